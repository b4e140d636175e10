"""Images whose positions see each other: chunks, cached prefixes, drafts, choices, and planted faults."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from chorus.core.engine import Engine
from chorus.core.executors import base
from chorus.core.media import serving
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.specs.layers import LayerSpec
from chorus.core.requests import request as requests
from chorus.core.requests.blocks import CutBlock, blocks_of
from chorus.core.requests.media import keys_of
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import InvalidRequest
from chorus.memory.pages.prefix import PrefixCache
from chorus.ops.attention.blocks import BlockMask

from .test_served_images import KERNELS, Asked, answers, engine_of, picture
from .tiny_vision import needs_vision

pytestmark = [pytest.mark.native(needed=False), pytest.mark.vision, needs_vision]

OF_IMAGES = ("gemma3", "gemma4")
OF_PROMPTS = ("paligemma", "paligemma2")
COUNT = 12
SEQUENCES = 2


@pytest.fixture(scope="module", params=[*OF_IMAGES, *OF_PROMPTS])
def asked(request: pytest.FixtureRequest) -> Asked:
    return Asked(request.param)


def about_two(asked: Asked, name: str = "two", adapter: str | None = None, text: str = "hi") -> Request:
    return asked.request(name, adapter, [picture(1, (90, 30)), picture(2, (20, 60))], text=text, count=COUNT)


def longest_block(asked: Asked, request: Request) -> int:
    """Tokens that a step must have room for."""
    if asked.reference.family in OF_PROMPTS:
        return request.num_prompt_tokens
    return max(count for item in request.media for _, count in item.runs)


def served(asked: Asked, **fields: Any) -> list[int]:
    """The answer about two images."""
    engine, request = engine_of(asked, **fields), about_two(asked)
    engine.add_request(request)
    found = answers(engine)["two"]
    engine.close()
    return found


def run(engine: Engine, request: Request) -> tuple[list[int], int]:
    """An answer, and how many tokens of its prompt were cached."""
    engine.add_request(request)
    found, cached = list[int](), 0
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            found += output.token_ids
            cached = max(cached, output.num_cached_tokens)
    return found, cached


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("more", [0, 1, 3, 8])
def test_chunks_end_before_blocks_and_behind_them(asked: Asked, kernels: str, more: int) -> None:
    """Steps with room for a block and few other tokens."""
    room = longest_block(asked, about_two(asked)) + SEQUENCES + more
    found = served(asked, kernels=kernels, max_num_batched_tokens=room, max_num_seqs=SEQUENCES)
    assert found == asked.wanted["two"]


def test_many_requests_share_small_steps(asked: Asked) -> None:
    """Prompts that take turns, beside answers: each gets its block at last."""
    sent = [about_two(asked, f"{number}", adapter) for number, adapter in enumerate((None, "linear", "text", "tower"))]
    room = longest_block(asked, sent[0]) + SEQUENCES
    engine = engine_of(asked, max_num_batched_tokens=room, max_num_seqs=SEQUENCES)
    for request in sent:
        request.tenant = request.id
        engine.add_request(request)
    engine.add_request(asked.request("text alone", "linear", [], count=COUNT))
    found = answers(engine)
    engine.check_integrity()
    engine.close()
    assert found == {name: asked.wanted[name] for name in found} and len(found) == 5


def test_a_block_that_no_step_has_room_for_is_refused(asked: Asked) -> None:
    request = about_two(asked)
    needed = longest_block(asked, request) + SEQUENCES
    engine = engine_of(asked, max_num_batched_tokens=needed - 1, max_num_seqs=SEQUENCES)
    with pytest.raises(InvalidRequest, match=f"raise max_num_batched_tokens to at least {needed}"):
        engine.add_request(request)
    engine.close()


@pytest.mark.parametrize("family", OF_PROMPTS)
def test_prompts_are_not_served_without_blocks(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"see each other, .* limit_mm_per_prompt allows no image"):
        engine_of(Asked(family), limit_mm_per_prompt={"image": 0})


def unmasked(layer: LayerSpec, *_: Any) -> LayerSpec:
    return layer


def other_layers(layer: LayerSpec, *_: Any) -> LayerSpec:
    """Blocks in layers without windows alone."""
    mixer = layer.attention
    if mixer is None or mixer.window is not None:
        return layer
    return replace(layer, mixer=replace(mixer, blocks=BlockMask.IN_WINDOW))


def beyond_windows(layer: LayerSpec, *_: Any) -> LayerSpec:
    mixer = layer.attention
    return layer if mixer is None else replace(layer, mixer=replace(mixer, blocks=BlockMask.WHOLE))


def within_windows(layer: LayerSpec, *_: Any) -> LayerSpec:
    mixer = layer.attention
    return layer if mixer is None else replace(layer, mixer=replace(mixer, blocks=BlockMask.IN_WINDOW))


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(
    ("family", "plant"),
    [
        *((family, unmasked) for family in (*OF_IMAGES, *OF_PROMPTS)),
        *((family, other_layers) for family in (*OF_IMAGES, "paligemma2")),
        *((family, beyond_windows) for family in OF_IMAGES),
        ("gemma4", within_windows),
        ("paligemma2", within_windows),
    ],
)
def test_masks_of_other_layers_are_found(
    family: str, plant: Callable[..., LayerSpec], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = Asked(family)
    assert served(asked, kernels=kernels) == (about_two(asked) and asked.wanted["two"])
    monkeypatch.setattr(serving, "_with_blocks", plant)
    assert served(asked, kernels=kernels) != asked.wanted["two"]


def test_further_inputs_of_placeholders_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: inputs of layers are looked up for the token at images' positions, not for the padding token."""
    asked = Asked("gemma4_inputs")
    assert served(asked) == (about_two(asked) and asked.wanted["two"])
    with_tower = base.with_tower
    monkeypatch.setattr(base, "with_tower", lambda *args: replace(with_tower(*args), image_lookup=None))
    assert served(asked) != asked.wanted["two"]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("block_tokens", [4, 16])
def test_a_cached_prefix_ends_before_a_block_or_behind_it(asked: Asked, kernels: str, block_tokens: int) -> None:
    engine = engine_of(asked, kernels, block_tokens=block_tokens)
    first = about_two(asked, "first")
    assert run(engine, first) == (asked.wanted["first"], 0)
    for name, text in (("again", "hi"), ("other text", "hi, how are you today?")):
        request = about_two(asked, name, text=text)
        found, cached = run(engine, request)
        assert found == asked.wanted[name]
        assert request.blocks.around(cached) is None
        assert (cached > 0) == (asked.reference.family in OF_IMAGES)  # a prompt is shared as a whole or not at all
    engine.close()


USABLE = PrefixCache.usable


def uncut(self: PrefixCache, blocks: Any, cut_at: Any = None, **how: Any) -> Any:
    return USABLE(self, blocks, **how)


def test_a_hit_within_a_block_is_cut_back(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are as long as it takes for a hit to end there. Planted: it is used as it is, which a step refuses."""
    one, other = about_two(asked, "one", text="hi"), about_two(asked, "other", text="How are you?")
    if asked.reference.family in OF_PROMPTS:  # an equal prompt, of which at least one token must be computed
        other = about_two(asked, "other", text="hi")
    pairs = zip(one.keys()[:-1], other.keys()[:-1], strict=False)
    common = next((at for at, (a, b) in enumerate(pairs) if a != b), one.num_prompt_tokens - 1)
    blocks = blocks_of(read_model_config(asked.reference.path).image_blocks, other.token_ids, other.media)
    ends = {size: common // size * size for size in (2, 4, 8, 16, 32)}
    sizes = (size for size, end in ends.items() if blocks.around(end) and end + 1 < other.num_prompt_tokens)
    engine = engine_of(asked, block_tokens=next(sizes))
    run(engine, one)
    found, cached = run(engine, other)
    assert found == asked.wanted["other"] and blocks.around(cached) is None
    engine.reset_prefix_cache()
    run(engine, about_two(asked, "one"))
    monkeypatch.setattr(PrefixCache, "usable", uncut)
    engine.add_request(replace_id(other, "planted"))
    errors = [output.error for _ in range(100) if engine.has_work() for output in engine.step()]
    engine.close()
    assert len(errors) == 1 and CutBlock.__name__ in str(errors[0])


def replace_id(request: Request, name: str) -> Request:
    """The same request again."""
    prompt = request.token_ids[: request.num_prompt_tokens]
    return Request(name, prompt, request.params, request.adapter_name, media=request.media)


def test_a_prefix_of_a_longer_prompt_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer goes on like a longer prompt whose tokens saw more; planted: tokens are told apart by themselves."""
    asked = Asked("paligemma")

    def begun(engine: Engine) -> list[int]:
        longer = about_two(asked, "longer", text="hi")
        short = about_two(asked, "short", text="hi")
        longer.token_ids += asked.wanted["short"][:8]
        longer.num_prompt_tokens = len(longer.token_ids)
        run(engine, longer)
        engine.add_request(short)
        found: list[int] = []
        while engine.has_work():
            for output in engine.step():
                found += output.token_ids
            if len(found) == 6 and short.is_running and not short.num_preemptions:
                engine.scheduler.lifecycle.preempt(short)
        engine.close()
        return found

    fields: dict[str, Any] = {"preemption": "recompute", "block_tokens": 4}
    assert begun(engine_of(asked, **fields)) == asked.wanted["short"]

    def plain(self: Request, begin: int = 0, end: int | None = None) -> Any:
        return keys_of(self.token_ids[begin:end], self.media, begin, self.media_scope)

    monkeypatch.setattr(requests.Request, "keys", plain)
    assert begun(engine_of(asked, **fields)) != asked.wanted["short"]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("after", [0, 5], ids=["within the prompt", "behind it"])
@pytest.mark.parametrize("cached", [True, False])
def test_preempted_requests_go_on(asked: Asked, kernels: str, preemption: str, after: int, cached: bool) -> None:
    request = about_two(asked, "preempted", "linear")
    room = longest_block(asked, request) + SEQUENCES
    engine = engine_of(
        asked, kernels, preemption=preemption, prefix_cache=cached, max_num_batched_tokens=room,
        max_num_seqs=SEQUENCES, block_tokens=4,
    )  # fmt: skip
    engine.add_request(request)
    found: list[int] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            found += output.token_ids
        if len(found) >= after and request.is_running and request.num_preemptions < 2 and request.num_computed_tokens:
            engine.scheduler.lifecycle.preempt(request)
    engine.check_integrity()
    engine.close()
    assert found == asked.wanted["preempted"] and request.num_preemptions == 2


@pytest.mark.parametrize("kernels", KERNELS)
def test_drafts_behind_blocks(asked: Asked, kernels: str) -> None:
    """The answer is expected, but for a token in its middle."""
    engine = engine_of(asked, kernels, speculation="ngram")
    request = about_two(asked, "told")
    wanted = asked.wanted["told"]
    request.prediction = [*wanted[:5], (wanted[5] + 1) % 50, *wanted[6:]]
    engine.add_request(request)
    found, stats = answers(engine)["told"], engine.stats()
    engine.close()
    assert found == wanted and stats.num_accepted_tokens > 2


def test_choices_of_one_prompt(asked: Asked) -> None:
    engine = engine_of(asked, block_tokens=4)
    for number in range(3):
        request = about_two(asked, f"{number}", "seven")
        request.choice_group = "all"
        engine.add_request(request)
    found = answers(engine)
    engine.check_integrity()
    engine.close()
    assert found == {f"{number}": asked.wanted[f"{number}"] for number in range(3)}
