"""Images that go to experts of their own: planted faults, other geometries, images off, and what is refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.media.serving import why_blind, with_tower
from chorus.core.model import batch
from chorus.core.model.families.ernie_vl import mixture
from chorus.core.model.families.ernie_vl.experts import ErnieVlExperts
from chorus.core.model.moe import mixture_lora
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.narrow_bytes import kept_bytes
from chorus.core.requests.media import MediaItem
from chorus.core.requests.request import Request
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter

from ...conftest import quiet
from ...kept import kept_files
from . import tiny_mrope
from .test_served_images import LEVEL, Asked, answers, engine_of, picture
from .tiny_vision import Answer, needs_vision, save_adapter, tiny

pytestmark = [pytest.mark.native(needed=False), pytest.mark.vision, needs_vision]

ERNIE = tiny_mrope.ERNIE
COUNT = 12


@pytest.fixture(scope="module")
def asked() -> Asked:
    return Asked(ERNIE)


def about_two(asked: Asked, name: str = "two", adapter: str | None = None, text: str = "hi") -> Request:
    return asked.request(name, adapter, [picture(1, (90, 30)), picture(2, (20, 60))], text=text, count=COUNT)


def served(asked: Asked, *requests: Request, **fields: Any) -> dict[str, Answer]:
    engine = engine_of(asked, **fields)
    assert not engine.adapters.quarantine and engine.model.why_blind is None
    for request in requests:
        engine.add_request(request)
    found = answers(engine)
    engine.close()
    return found


def all_to_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "image_tokens", lambda *_: None)


def ends_to_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MediaItem, "with_ends", lambda item, *_: item)


def first_rows_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a chunk had no rows behind its first."""
    found = batch.image_tokens
    monkeypatch.setattr(batch, "image_tokens", lambda *args: None if (own := found(*args)) is None else own[:1])


def adapters_of_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adapters of text's experts change those of images, which have the same numbers."""
    of_rows = mixture_lora.MixtureLora.of_rows
    changed = lambda own, tokens, has_experts: of_rows(own, tokens, has_experts=True)  # noqa: E731
    monkeypatch.setattr(mixture_lora.MixtureLora, "of_rows", changed)


def adapters_of_first_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of a mixture are taken for the step's first tokens."""
    mix = mixture.mix_by_modality
    wrong = lambda x, both, spec, places, lora: mix(x, both, spec, places, _Unmoved(lora) if lora else None)  # noqa: E731
    monkeypatch.setattr(mixture, "mix_by_modality", wrong)


class _Unmoved:
    """Adapters whose rows are not told apart."""

    def __init__(self, lora: mixture_lora.MixtureLora) -> None:
        self._lora = lora

    def of_rows(self, tokens: list[int], *, has_experts: bool) -> mixture_lora.MixtureLora:
        return self._lora.of_rows(range(len(tokens)), has_experts=has_experts)


@pytest.mark.parametrize(
    "plant", [all_to_text, ends_to_text, first_rows_only, adapters_of_all_experts, adapters_of_first_rows]
)
def test_planted_faults_are_found(
    asked: Asked, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def found() -> dict[str, Answer]:
        requests = [about_two(asked, f"{name}", name) for name in (None, "experts", "linear")]
        return served(asked, *requests, asked.request("text", "experts", [], count=COUNT))

    answered = found()
    assert answered == {name: asked.wanted[name] for name in ("None", "experts", "linear", "text")}
    plant(monkeypatch)
    try:
        planted = found()
    except AssertionError:  # a request ended with an error
        return
    assert planted != answered


def test_marks_without_an_image_are_text(asked: Asked) -> None:
    """Nor are they found in the cache of prefixes for those of an image, whatever their places in blocks."""
    request = about_two(asked)
    first = request.media[1].runs[0][0]
    engine = engine_of(asked, block_tokens=1)
    begun = Request("begun", [*request.token_ids[:first], 5, 6], request.params, media=request.media[:1])
    for each in (begun, request):
        engine.add_request(each)
        found = answers(engine)
    engine.close()
    assert found["two"] == asked.wanted["two"]
    assert begun.keys()[first - 1] == request.token_ids[first - 1] != request.keys()[first - 1]


def geometry(seed: int, path: Path) -> None:
    draw = random.Random(seed)
    experts, heads = draw.randint(3, 9), draw.choice((2, 4))
    head_dim = draw.choice((8, 16, 24))
    sides = draw.randint(1, (head_dim // 2 - 1) // 2)
    fields = {
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice((1, heads)),
        "moe_num_experts": experts,
        "moe_k": draw.randint(1, experts),
        "moe_num_shared_experts": draw.randint(0, 2),
        "moe_intermediate_size": [8 * draw.randint(1, 6), 8 * draw.randint(1, 6)],
        "mlp_layer_types": [draw.choice(("dense", "sparse")) for _ in range(2)] + ["sparse"],
        "num_hidden_layers": 3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5000.0,
            "mrope_section": [sides, sides, head_dim // 2 - 2 * sides],
        },
    }
    tiny_mrope.save_model(ERNIE, path, fields)
    save_adapter(path, ERNIE, "linear", {"target_modules": "all-linear"}, seed)
    save_adapter(path, ERNIE, "experts", tiny_mrope.adapters(ERNIE)["experts"], seed)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.wide), pytest.param(3, marks=pytest.mark.wide)])
def test_other_geometries(seed: int) -> None:
    path = kept_files(f"vision-{ERNIE}-{seed}", quiet()(lambda path: geometry(seed, path)))
    asked = Asked(ERNIE, path)
    requests = [about_two(asked, f"{adapter}", adapter) for adapter in (None, "linear", "experts")]
    requests += [asked.request(f"text {adapter}", adapter, [], count=COUNT) for adapter in (None, "linear", "experts")]
    assert served(asked, *requests, max_num_batched_tokens=7, max_num_seqs=6) == asked.wanted


@pytest.mark.skipif(LEVEL is None, reason="no native library")
def test_with_images_off_the_native_decoder_serves_text(asked: Asked) -> None:
    fields = {"model": asked.reference.path, "adapters": asked.reference.path / "adapters", "memory_bytes": 64 << 20}
    fields |= {"device": "cpu", "dtype": "float32", "cpu_kernels": "native"}
    with pytest.raises(UnsupportedModel, match="mixture with experts of images"):
        Engine.from_config(EngineConfig(**fields))
    engine = Engine.from_config(EngineConfig(**fields, limit_mm_per_prompt={"image": 0}))
    requests = [asked.request(f"text {adapter}", adapter, [], count=COUNT) for adapter in (None, "text", "experts")]
    for request in requests:
        engine.add_request(request)
    assert answers(engine) == {request.id: asked.wanted[request.id] for request in requests}
    engine.close()


def test_experts_of_images_take_memory_where_images_are_served_alone() -> None:
    path = tiny(ERNIE)
    text = read_model_config(path)
    sees = with_tower(EngineConfig(model=path), text)
    experts, hidden = text.experts, text.hidden_size
    assert isinstance(experts, ErnieVlExperts)
    layers = sum(layer.experts is not None for layer in text.layers)
    each = 3 * experts.image_size * hidden + hidden + 1  # gate, up and down, and the router's row and its correction
    assert kept_bytes(sees, 1) - kept_bytes(text, 1) == layers * experts.count * each


def test_gpus_refuse_images_and_serve_text() -> None:
    config = EngineConfig(model=tiny(ERNIE), attention="torch")
    model = read_model_config(config.model)
    assert why_blind(config, model, on_gpu=False) is None
    why = why_blind(config, model, on_gpu=True)
    assert why is not None and "experts of their own" in why


def test_adapters_of_experts_of_images_are_refused(tmp_path: Path) -> None:
    path = tiny(ERNIE)
    fields = {"target_modules": ["q_proj"], "target_parameters": ["vision_moe.experts.down_proj"]}
    modules = with_tower(EngineConfig(model=path), read_model_config(path)).module_paths
    save_adapter(path, ERNIE, "", fields, 1, tmp_path)
    assert inspect_adapter(path / "adapters" / "experts", modules).parts
    with pytest.raises(AdapterFormatError, match="vision_moe"):
        inspect_adapter(tmp_path, modules)
