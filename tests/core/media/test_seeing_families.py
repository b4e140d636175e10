"""Images of every family that sees, with adapters of text, tower and both: tokens of transformers and peft."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.media.images import BadImage, open_image
from chorus.core.media.serving import why_blind, with_tower
from chorus.core.media.tower import Tower
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.vision import TOKEN_FIELDS
from chorus.core.requests.request import Request
from chorus.memory.files.format import inspect_adapter

from .seeing_families import SEEING
from .test_served_images import SIZES, Asked, answers, engine_of, files, images_of, picture
from .tiny_vision import ADAPTERS, Answer, adapters_of, needs_vision, tiny

pytestmark = [pytest.mark.native(needed=False), pytest.mark.vision, needs_vision]


@pytest.fixture(scope="module", params=list(SEEING))
def asked(request: pytest.FixtureRequest) -> Asked:
    return Asked(request.param)


def drain(asked: Asked, requests: list[Request], **fields: Any) -> dict[str, Answer]:
    """The answers of an engine to requests, all at once."""
    engine = engine_of(asked, **fields)
    assert not engine.adapters.quarantine and engine.model.why_blind is None
    for request in requests:
        engine.add_request(request)
    found = answers(engine)
    engine.close()
    return found


def wanted(asked: Asked, requests: list[Request]) -> dict[str, Answer]:
    return {request.id: asked.wanted[request.id] for request in requests}


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_images_and_adapters_in_one_batch(asked: Asked, kernels: str) -> None:
    """Images of all sizes, one to four a request, beside requests of text; chunks end inside images."""
    images, requests = images_of(asked), list[Request]()
    for number, adapter in enumerate((None, *adapters_of(asked.reference.family))):
        for count in (0, 1 + number % SEEING[asked.reference.family].most):
            own = [images[(number + index) % len(images)] for index in range(count)]
            requests.append(asked.request(f"{adapter} {count}", adapter, own))
    assert drain(asked, requests, kernels=kernels) == wanted(asked, requests)


def test_each_size_is_served_or_refused(asked: Asked) -> None:
    requests = []
    for seed, (name, size) in enumerate(SIZES.items()):
        if name not in SEEING[asked.reference.family].refused:
            requests.append(asked.request(name, "linear", [picture(seed, size)]))
            continue
        with pytest.raises(BadImage, match=r"is refused by|send a larger one"):
            asked.processor.of_image(picture(seed, size))
    assert drain(asked, requests) == wanted(asked, requests)


def test_each_kind_of_file_is_seen_as_its_rgb_image(asked: Asked) -> None:
    requests = []
    for name, data in files().items():
        request = asked.request(name, None, [open_image(data)])
        media = (replace(request.media[0], data=data),)
        requests.append(Request(name, request.token_ids, request.params, media=media))
    assert drain(asked, requests) == wanted(asked, requests)


def test_an_adapter_changes_what_is_seen(asked: Asked) -> None:
    """Else a tower that ignores adapters would pass; and images differ, else one that ignores them would."""
    image = picture(1, (40, 60))
    asked.request("plain", None, [image])
    for adapter in ("tower", "dora", "copied", "seven"):
        asked.request("changed", adapter, [image])
        assert asked.wanted["plain"] != asked.wanted["changed"]
    asked.request("other", "linear", [picture(2, (40, 60))])
    asked.request("linear", "linear", [image])
    assert asked.wanted["other"] != asked.wanted["linear"]


def test_images_are_found_again(asked: Asked) -> None:
    """In the cache of rows, and in that of prompts: an adapter of text alone shares the base model's rows."""
    engine, image = engine_of(asked), picture(3, (40, 60))
    for number, adapter in enumerate((None, "text", None, "tower", "tower")):
        request = asked.request(f"{number}", adapter, [image], text=f"question {number}")
        engine.add_request(request)
        assert answers(engine) == wanted(asked, [request])
    assert engine.encoder is not None
    assert (engine.encoder.num_encoded, engine.encoder.num_found) == (2, 3)
    engine.close()


@pytest.mark.parametrize("times", [2, 0.5])
def test_a_wrong_number_of_tiles_is_found(asked: Asked, times: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It divides evenly, so that each row would find a place."""
    encode = Tower.encode

    def wrong(*args: Any) -> torch.Tensor:
        rows = encode(*args)
        return torch.cat([rows, rows]) if times > 1 else rows[: len(rows) // 2]

    monkeypatch.setattr(Tower, "encode", wrong)
    engine = engine_of(asked)
    engine.add_request(asked.request("wrong", None, [picture(2, (40, 60))]))
    (output,) = [each for _ in range(10_000) if engine.has_work() for each in engine.step()]
    engine.close()
    assert output.error is not None and "placeholders" in output.error


def older(path: Path, family: str, name: str) -> Path:
    """An adapter with the names of modules that it would have from transformers 4."""
    shutil.copytree(tiny(family) / "adapters" / name, path)
    file = path / "adapter_model.safetensors"

    def renamed(tensor: str) -> str:
        for now, before in SEEING[family].renamed:
            tensor = tensor.replace(f".{now}", f".{before}", 1)
        return tensor

    tensors = {renamed(tensor): values for tensor, values in load_file(file).items()}
    assert not SEEING[family].renamed or not tensors.keys() & load_file(file).keys()
    save_file(tensors, file)
    config = path / "adapter_config.json"
    fields = json.loads(config.read_text())
    targets = fields["target_modules"]
    if isinstance(targets, str) and any("vision_model" in before for _, before in SEEING[family].renamed):
        # A pattern of the names of then.
        config.write_text(json.dumps({**fields, "target_modules": targets.replace("vision_tower.*", "vision_model.*")}))
    return path


@pytest.mark.parametrize("name", [each for each in ADAPTERS if each != "dora"])
@pytest.mark.parametrize("family", [name for name, it in SEEING.items() if it.renamed])
def test_adapters_of_transformers_4_are_the_same(family: str, name: str, tmp_path: Path) -> None:
    path = tiny(family)
    modules = with_tower(EngineConfig(model=path), read_model_config(path)).module_paths
    now = inspect_adapter(path / "adapters" / name, modules)
    then = inspect_adapter(older(tmp_path / name, family, name), modules)
    assert {each[1:] for each in then.tower} == {each[1:] for each in now.tower}
    assert (len(then.parts), then.num_left_out) == (len(now.parts), now.num_left_out)


@pytest.mark.parametrize("family", list(SEEING))
def test_each_family_says_that_it_sees(family: str, tmp_path: Path) -> None:
    """A checkpoint whose placeholder has the number that transformers takes for granted does not name it."""
    import transformers

    path = tiny(family)
    model = read_model_config(path)
    assert model.vision is not None and model.image_token is not None
    assert why_blind(EngineConfig(model=path), model, on_gpu=False) is None
    fields = json.loads((path / "config.json").read_text())
    usual = getattr(transformers, f"{SEEING[family].name}Config")().image_token_id
    named = {name: value for name, value in fields.items() if name not in TOKEN_FIELDS}
    (tmp_path / "config.json").write_text(json.dumps(named))
    assert read_model_config(tmp_path).image_token == usual == model.vision.token
