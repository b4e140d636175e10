"""What an engine does with images: tokens of transformers and peft. All families: test_seeing_families.py."""

from __future__ import annotations

import random
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.model.read_config import read_model_config
from chorus.core.requests.blocks import Blocks
from chorus.core.requests.media import MediaItem, placed
from chorus.core.requests.record import to_record
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import InvalidRequest, RequestParams
from chorus.core.sleep import Sleep
from chorus.memory.files.error import LoadFailure
from chorus.memory.files.identity import with_content
from chorus.ops.library import native_library

from . import tiny_mrope
from .tiny_vision import ADAPTERS, Answer, Reference, needs_vision, refused_of, step_of

pytestmark = [pytest.mark.native(needed=False), pytest.mark.vision, needs_vision]

COUNT = 6
LEVEL = native_library.level()
KERNELS = ["torch", pytest.param("native", marks=pytest.mark.skipif(LEVEL is None, reason="no native library"))]

SIZES = {
    "portrait": (30, 90),
    "panorama": (120, 31),
    "one pixel high": (50, 1),
    "large": (300, 200),
    "small": (9, 7),
}


def picture(seed: int, size: tuple[int, int]) -> Any:
    from PIL import Image

    width, height = size
    values = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


@cache
def known(family: str) -> tuple[Reference, Any]:
    """The reference of a kept model, and its image processor."""
    from chorus.core.media.processor import ImageProcessor

    reference = Reference(family)
    return reference, ImageProcessor(reference.path)


class Asked:
    """Requests with images and their reference answers."""

    def __init__(self, family: str, path: Path | None = None) -> None:
        """path: see `Reference`."""
        from chorus.core.media.images import encoded
        from chorus.core.media.processor import ImageProcessor

        if path is None:
            self.reference, self.processor = known(family)
        else:
            self.reference, self.processor = Reference(family, path), ImageProcessor(path)
        self._encoded = encoded
        model = read_model_config(self.reference.path)
        self.placeholder, self.marks = model.image_token, model.image_marks
        # PaliGemma's processor writes more than images: a chat template does so on a server.
        self._has_own_prompts = model.image_blocks is Blocks.PROMPT
        self.wanted: dict[str, Answer] = {}

    def request(
        self,
        id: str,
        adapter: str | None,
        images: list[Any],
        text: str = "hi",
        count: int = COUNT,
        settings: dict[str, Any] | None = None,
        **fields: Any,
    ) -> Request:
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
        messages = [{"role": "user", "content": content}]
        prompt, self.wanted[id] = self.reference.answer(adapter, messages, images, count, settings)
        found = [self.processor.of_image(image, settings) for image in images]
        if not self._has_own_prompts:
            assert self.reference.tokens_of(messages, self.processor.places, [each.text for each in found]) == prompt
        runs = placed(prompt, self.placeholder, [each.num_rows for each in found], self.marks)
        items = tuple(
            MediaItem(self._encoded(image), each.digest, own, each.grid, settings=each.settings)
            for image, each, own in zip(images, found, runs, strict=True)
        )
        params = RequestParams(max_tokens=count, temperature=0, ignore_eos=True, logprobs=0)
        return Request(id, prompt, params, adapter, media=items, **fields)


def images_of(asked: Asked) -> list[Any]:
    """An image of each size that the family takes."""
    refused = refused_of(asked.reference.family)
    return [picture(seed, size) for seed, (name, size) in enumerate(SIZES.items()) if name not in refused]


#: Families with tests of their own of what they have in common; the rest of theirs are `wide`.
EVERY = [
    name if name in ("smolvlm", "mistral3", "qwen2_5_vl", "qwen3_vl") else pytest.param(name, marks=pytest.mark.wide)
    for name in ("smolvlm", "mistral3", *tiny_mrope.FAMILIES)
]


@pytest.fixture(scope="module", params=EVERY)
def asked(request: pytest.FixtureRequest) -> Asked:
    return Asked(request.param)


def engine_of(asked: Asked, kernels: str = "torch", **fields: Any) -> Engine:
    path = asked.reference.path
    usual = {"memory_bytes": 64 << 20, "max_num_batched_tokens": 48, "threads": 1, "prefix_cache": True}
    usual |= {"model": path, "adapters": path / "adapters"}
    usual |= step_of(asked.reference.family)
    if kernels == "native" and asked.reference.family in tiny_mrope.ON_TORCH:
        kernels = "auto"  # PyTorch's operators, with the native library's products
    return Engine.from_config(EngineConfig(cpu_kernels=kernels, device="cpu", dtype="float32", **usual | fields))


def answers(engine: Engine) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            answer = found.setdefault(output.request_id, Answer())
            answer.extend(output.token_ids)
            answer.logprobs.extend(each.logprob for each in output.logprobs)
    return found


@pytest.fixture
def engine(asked: Asked) -> Iterator[Engine]:
    found = engine_of(asked)
    yield found
    found.close()


@pytest.mark.parametrize("kernels", KERNELS)
def test_images_and_adapters_in_one_batch(asked: Asked, kernels: str) -> None:
    images = images_of(asked)
    engine = engine_of(asked, kernels, max_num_batched_tokens=37)  # chunks end inside images
    assert not engine.adapters.quarantine and engine.model.why_blind is None
    wanted = {}
    for number, adapter in enumerate((None, *ADAPTERS)):
        for count in (0, 1 + number % 4):
            own = [images[(number + index) % len(images)] for index in range(count)]
            request = asked.request(f"{adapter} {count}", adapter, own)
            wanted[request.id] = asked.wanted[request.id]
            engine.add_request(request)
    found = answers(engine)
    engine.close()
    assert found == wanted


def files() -> dict[str, bytes]:
    """An image as files of other kinds than RGB."""
    from PIL import Image

    def file_of(image: Any, format: str = "PNG", **more: Any) -> bytes:
        file = BytesIO()
        image.save(file, format, **more)
        return file.getvalue()

    rgb = picture(8, (60, 40))
    transparent = rgb.copy()
    transparent.putalpha(Image.linear_gradient("L").resize(rgb.size))
    turned = rgb.getexif()
    turned[0x0112] = 6
    deep = np.random.default_rng(2).integers(0, 1 << 16, (40, 60), dtype=np.uint16)
    return {
        "grey": file_of(rgb.convert("L")),
        "palette": file_of(rgb.convert("P")),
        "transparent": file_of(transparent),
        "16 bits": file_of(Image.fromarray(deep)),
        "turned": file_of(rgb, "JPEG", exif=turned),
    }


def test_each_kind_of_file_is_seen_as_its_rgb_image(asked: Asked, engine: Engine) -> None:
    from chorus.core.media.images import open_image

    for name, data in files().items():
        request = asked.request(name, None, [open_image(data)])
        (item,) = request.media
        engine.add_request(Request(name, request.token_ids, request.params, media=(replace(item, data=data),)))
    assert answers(engine) == {name: asked.wanted[name] for name in files()}


def test_the_digest_covers_pixels_and_settings(asked: Asked, tmp_path: Path) -> None:
    """Else rows of another resolution would be found in a cache."""
    from chorus.core.media.processor import ImageProcessor, pixels_of

    image, path = picture(1, (40, 60)), tmp_path / "other"
    own = asked.processor.digest(pixels_of(image))
    shutil.copytree(asked.reference.path, path, ignore=shutil.ignore_patterns("adapters", "*.safetensors"))
    assert ImageProcessor(path).digest(pixels_of(image)) == own
    for name in ("preprocessor_config.json", "processor_config.json"):
        if (path / name).exists():
            text = (path / name).read_text()
            (path / name).write_text(re.sub(r'"longest_edge": \d+', '"longest_edge": 48', text))
    assert ImageProcessor(path).digest(pixels_of(image)) != own
    other = image.copy()
    other.putpixel((0, 0), (0, 0, 0))
    assert asked.processor.digest(pixels_of(other)) != own != asked.processor.digest(pixels_of(image.transpose(2)))


def test_an_adapter_changes_what_is_seen(asked: Asked) -> None:
    """Else a tower that ignores adapters would pass."""
    image = picture(1, (40, 60))
    for adapter in ("tower", "dora", "copied", "seven"):
        asked.request("plain", None, [image])
        asked.request("changed", adapter, [image])
        assert asked.wanted["plain"] != asked.wanted["changed"]


def test_the_second_use_of_an_image_costs_no_encoding(asked: Asked, engine: Engine) -> None:
    image = picture(3, (40, 60))
    for number, adapter in enumerate((None, "text", None, "tower", "tower", "linear")):
        request = asked.request(f"{number}", adapter, [image], text=f"question {number}")
        engine.add_request(request)
        assert answers(engine)[request.id] == asked.wanted[request.id]
    assert engine.encoder is not None
    assert engine.encoder.num_encoded == 3  # of the base model, which the text's adapter shares; tower; linear
    assert engine.encoder.num_found == 3
    assert 0 < engine.stats().image_rows_bytes <= engine.store.images.budget.num_bytes


def test_reset_rows_are_encoded_again(asked: Asked, engine: Engine) -> None:
    image = picture(3, (40, 60))
    for number in range(2):
        request = asked.request(f"{number}", None, [image], text=f"question {number}")
        engine.add_request(request)
        assert answers(engine)[request.id] == asked.wanted[request.id]
        assert engine.stats().image_rows_bytes > 0 and engine.reset_image_rows() == 1
        assert engine.stats().image_rows_bytes == 0
    assert engine.encoder is not None and engine.encoder.num_encoded == 2


def test_equal_prompts_with_other_images_share_no_blocks(asked: Asked, engine: Engine) -> None:
    first, second = picture(5, (40, 60)), picture(6, (40, 60))
    cached = {}
    for name, image in (("a", first), ("b", second), ("a again", first)):
        request = asked.request(name, None, [image])
        engine.add_request(request)
        found: list[int] = []
        while engine.has_work():
            for output in engine.step():
                cached.setdefault(name, output.num_cached_tokens)
                found += output.token_ids
        assert found == asked.wanted[name]
    assert cached["a again"] > cached["b"] and cached["b"] < 16 + 16


def test_a_tower_alone_shares_no_blocks_with_the_base(asked: Asked, engine: Engine) -> None:
    """An adapter of the tower alone leaves the text's KV to the base model, but not that of images."""
    image = picture(7, (60, 40))
    for name, adapter in (("base", None), ("tower", "tower"), ("base again", None), ("tower again", "tower")):
        request = asked.request(name, adapter, [image])
        engine.add_request(request)
        assert answers(engine)[name] == asked.wanted[name]


def test_an_adapter_of_the_tower_alone_is_pinned_replaced_and_kept_over_a_sleep(asked: Asked) -> None:
    engine = engine_of(asked)
    path = engine.store.get("tower").manifest.path
    for _ in range(2):
        engine.store.register("tower", path)
        while not engine.adapters.pin("tower"):  # one with a part in the text, too, is still being read
            engine.step()
    asleep = Sleep(engine)
    asleep.wake()
    assert engine.store.get("tower") in engine.store.pins
    engine.add_request(asked.request("tower", "tower", [picture(7, (60, 40))]))
    assert answers(engine)["tower"] == asked.wanted["tower"]
    engine.close()


@pytest.mark.parametrize("preemption", ["swap", "recompute"])
@pytest.mark.parametrize("after", [0, 3], ids=["within its images", "behind them"])
def test_preempted_requests_keep_their_images(asked: Asked, preemption: str, after: int) -> None:
    engine = engine_of(asked, preemption=preemption, prefix_cache=False, max_num_batched_tokens=16, max_num_seqs=8)
    request = asked.request("preempted", "linear", [picture(1, (40, 60)), picture(2, (30, 90))])
    engine.add_request(request)
    found: list[int] = []
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output.error
            found += output.token_ids
        if len(found) >= after and request.is_running and not request.num_preemptions and request.num_computed_tokens:
            engine.scheduler.lifecycle.preempt(request)
    engine.close()
    assert found == asked.wanted["preempted"] and request.num_preemptions == 1


def test_a_placeholder_without_an_image_is_refused(asked: Asked, engine: Engine) -> None:
    params = RequestParams(max_tokens=2, temperature=0)
    with pytest.raises(InvalidRequest, match="stands for a part of an image"):
        engine.add_request(Request("raw", [5, asked.placeholder, 6], params))
    request = asked.request("more", None, [picture(1, (40, 60))])
    with pytest.raises(InvalidRequest, match="stands for a part of an image"):
        engine.add_request(Request("one more", [*request.token_ids, asked.placeholder], params, media=request.media))


def test_a_sampled_placeholder_is_an_ordinary_token(asked: Asked, engine: Engine) -> None:
    """Rows are bound by position: a generated placeholder has its own embedding, as without images."""
    request = asked.request("forced", None, [picture(1, (40, 60))], count=2)
    params = RequestParams(max_tokens=5, temperature=0, ignore_eos=True, allowed_token_ids=(asked.placeholder,))
    engine.add_request(Request("forced", request.token_ids, params, media=request.media))
    assert answers(engine)["forced"] == [asked.placeholder] * 5
    again = Request("resumed", request.token_ids, params, media=request.media)
    again.token_ids += [asked.placeholder] * 2
    assert again.keys()[-2:] == [asked.placeholder] * 2


def test_a_file_that_is_no_image_ends_its_request_alone(asked: Asked, engine: Engine) -> None:
    image = picture(2, (40, 60))
    request = asked.request("bad", None, [image])
    bad = replace(request.media[0], data=b"no image", digest="0" * 32)
    engine.add_request(Request("bad", request.token_ids, request.params, media=(bad,)))
    good = asked.request("good", None, [image])
    engine.add_request(good)
    errors, tokens = {}, []
    while engine.has_work():
        for output in engine.step():
            if output.error is not None:
                errors[output.request_id] = output.error
            elif output.request_id == "good":
                tokens += output.token_ids
    assert tokens == asked.wanted["good"] and "no image that is read" in errors["bad"]


def test_an_item_of_another_digest_is_not_encoded(asked: Asked, engine: Engine) -> None:
    """As from a server of another version, whose settings would give other rows under the same name."""
    request = asked.request("other", None, [picture(2, (40, 60))])
    item = replace(request.media[0], digest="x")
    engine.add_request(Request("other", request.token_ids, request.params, media=(item,)))
    (output,) = [each for _ in range(10_000) if engine.has_work() for each in engine.step()]
    assert output.error is not None and "prepared otherwise" in output.error


def test_a_wrong_number_of_rows_is_found(asked: Asked, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the rows divide evenly among tiles, and would be placed without any error of shapes."""
    from chorus.core.media.tower import Tower

    encode = Tower.encode
    monkeypatch.setattr(Tower, "encode", lambda *args: torch.cat([encode(*args)] * 2))
    engine.add_request(asked.request("twice", None, [picture(2, (40, 60))]))
    (output,) = [each for _ in range(10_000) if engine.has_work() for each in engine.step()]
    assert output.error is not None and "placeholders" in output.error


def test_an_aborted_request_leaves_the_others(asked: Asked, engine: Engine) -> None:
    images = [picture(seed, (60, 40)) for seed in range(3)]
    for number, image in enumerate(images):
        engine.add_request(asked.request(f"{number}", "tower", [image]))
    assert engine.abort("1") and not engine.abort("1")
    found = answers(engine)
    assert found == {name: asked.wanted[name] for name in ("0", "2")}
    engine.check_integrity()


@pytest.mark.parametrize("adapter", ["text", "tower"], ids=["of text", "of images alone"])
@pytest.mark.parametrize("is_queued", [False, True], ids=["waits for its image", "queued"])
def test_a_removed_adapters_requests_end(asked: Asked, engine: Engine, adapter: str, *, is_queued: bool) -> None:
    for name in (None, adapter, "linear"):
        engine.add_request(asked.request(f"{name}", name, [picture(1, (60, 40))]))
    while is_queued and engine.is_encoding:
        engine.begin_step()
    assert engine.is_encoding is not is_queued and engine.adapters.remove(adapter, force=True) == 1
    (ended,) = engine.pop_ended()
    assert (ended.request_id, ended.failure) == (adapter, LoadFailure.REMOVED)
    assert adapter not in [each.name for each in engine.store.versions()], "no request holds it"
    assert answers(engine) == {name: asked.wanted[name] for name in ("None", "linear")}
    engine.check_integrity()


def test_text_does_not_wait_for_images(asked: Asked, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from chorus.core.media.tower import Tower

    encode, may_go = Tower.encode, threading.Event()

    def held(*args: Any) -> torch.Tensor:
        may_go.wait()
        return encode(*args)

    monkeypatch.setattr(Tower, "encode", held)
    seeing = asked.request("seeing", None, [picture(1, (40, 60))])
    engine.add_request(seeing)
    engine.add_request(asked.request("text", "linear", []))
    found: dict[str, list[int]] = {"text": [], "seeing": []}
    while len(found["text"]) < COUNT:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    assert not found["seeing"] and engine.has_work() and engine.stats().num_waiting_for_images == 1
    may_go.set()
    found |= answers(engine)
    assert found == {name: asked.wanted[name] for name in found}


def test_tenants_share_neither_rows_nor_blocks(asked: Asked, engine: Engine) -> None:
    """Else one could find out, by time or `cached_tokens`, which images another has sent."""
    image, cached = picture(1, (40, 60)), dict[str, int]()
    for name, tenant, salt in (("a", "a", ""), ("b", "b", ""), ("c", "b", "salt"), ("d", "a", "")):
        engine.add_request(asked.request(name, None, [image], tenant=tenant, cache_salt=salt))
        while engine.has_work():
            for output in engine.step():
                cached.setdefault(output.request_id, output.num_cached_tokens)
    assert cached["a"] == cached["b"] == cached["c"] == 0 < cached["d"]
    assert engine.encoder is not None
    assert (engine.encoder.num_encoded, engine.encoder.num_found) == (3, 1)


def test_a_small_cache_serves_many_images(asked: Asked) -> None:
    engine = engine_of(asked, encoder_cache_bytes=1)
    images = [picture(seed, (60, 40)) for seed in range(4)]
    order = random.Random(1).choices(range(4), k=6)
    for number, which in enumerate(order):
        engine.add_request(asked.request(f"{number}", None, [images[which], images[(which + 1) % 4]]))
    found = answers(engine)
    engine.close()
    assert found == {name: asked.wanted[name] for name in map(str, range(6))}


def test_a_request_is_continued_elsewhere_with_its_images(asked: Asked, engine: Engine) -> None:
    request = asked.request("moved", None, [picture(4, (60, 40))])
    engine.add_request(request)
    begun: list[int] = []
    while len(begun) < 3:
        begun += [token for output in engine.step() for token in output.token_ids]
    record = to_record(request, 0.0)
    other = engine_of(asked)
    other.resume(record)
    rest = answers(other)["moved"]
    other.close()
    assert begun + rest == asked.wanted["moved"]


@pytest.mark.parametrize("adapter", ["tower", "seven", "copied"])
def test_a_request_is_continued_elsewhere_with_its_adapters_tower(asked: Asked, engine: Engine, adapter: str) -> None:
    """Also one whose adapter changes images alone, which has none in the steps."""
    request = asked.request("moved", adapter, [picture(4, (60, 40))])
    engine.add_request(request)
    begun: list[int] = []
    while len(begun) < 3:
        begun += [token for output in engine.step() for token in output.token_ids]
    other = engine_of(asked)
    for each in (engine, other):
        for version in list(each.store.versions()):
            each.store.note(version, with_content(version.manifest))
    assert isinstance(other.resume(to_record(request, 0.0)), Request)
    rest = answers(other)["moved"]
    other.close()
    assert begun + rest == asked.wanted["moved"]
