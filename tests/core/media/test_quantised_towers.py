"""Images beside quantised text parts: the tower stays as it is, and one that is quantised, too, is refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.media.processor import Prepared
from chorus.core.media.serving import tower_bytes, why_blind
from chorus.core.media.tower import Tower, skeleton
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.vision import VisionSpec

from ...kept import name_of
from ..model.checkpoints.quantization.forms import FORMS
from .test_bf16_towers import theirs
from .test_served_images import KERNELS, Asked, answers, engine_of, images_of
from .tiny_vision import Answer, needs_vision, tiny

pytestmark = [pytest.mark.native(needed=False), pytest.mark.vision, needs_vision]

FAMILIES = ("smolvlm", "qwen2_5_vl")
STORED = ["awq", "gptq", "fp8 channels", "compressed int8", "bnb nf4"]
ADAPTERS = (None, "text", "tower", "linear", "copied")


def write_twins(root: Path, family: str, form_name: str, part: str = "text") -> tuple[Path, Path]:
    """A checkpoint with a quantised text part, and one with the dequantised values. part: or else `tower` alone."""
    form, source = FORMS[form_name], tiny(family)
    quantised, twin = root / "quantised", root / "twin"
    for path in (twin, quantised):
        shutil.copytree(source, path)
    values = load_file(source / "model.safetensors")
    stored = dict(values)
    torch.manual_seed(3)
    for name, weight in list(values.items()):
        module = name.removesuffix(".weight")
        where = "tower" if "visi" in name or "visual" in name else "text" if ".layers." in name else ""
        is_matrix = weight.ndim == 2 and module.endswith(("proj", "qkv"))
        if is_matrix and where == part and not module.endswith(tuple(form.plain)):
            del stored[name]
            tensors, values[name] = form.quantise(module, (weight.shape[0], weight.shape[1]))
            stored |= {f"{module}.{end}": tensor.contiguous() for end, tensor in tensors.items()}
    save_file(values, twin / "model.safetensors")
    save_file(stored, quantised / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": form.how}))
    return quantised, twin


def served(asked: Asked, **fields: Any) -> tuple[dict[str, Answer], dict[str, Answer]]:
    """Answers about images under adapters, and what transformers and peft say to the same."""
    images, engine, wanted = images_of(asked), engine_of(asked, **fields), dict[str, Answer]()
    assert engine.model.why_blind is None and not engine.adapters.quarantine
    for number, adapter in enumerate(ADAPTERS):
        for count in (0, 1 + number % 2):
            own = [images[(number + index) % len(images)] for index in range(count)]
            request = asked.request(f"{adapter} {count}", adapter, own)
            wanted[request.id] = asked.wanted[request.id]
            engine.add_request(request)
    found = answers(engine)
    engine.close()
    return found, wanted


@pytest.mark.parametrize("form", [pytest.param(each, marks=pytest.mark.wide) for each in STORED])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantised_checkpoint_sees_as_its_twin(family: str, form: str, tmp_path: Path) -> None:
    """By operators that multiply the dequantised values, as the reference does."""
    quantised, twin = write_twins(tmp_path, family, form)
    found, wanted = served(Asked(family, twin), model=quantised)
    assert found == wanted


class TransformersRows:
    """In the place of a tower: rows of transformers and peft."""

    def __init__(self, directory: Path, architecture: str, spec: VisionSpec, *_: Any) -> None:
        self._family = name_of(directory).removeprefix("vision-")

    def encode(self, tensors: dict[str, Any], changes: Any = None, marks: tuple[int, ...] = ()) -> torch.Tensor:
        return theirs(self._family, None, Prepared("", "", 0, tensors, marks=marks), torch.float32)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("quantization", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_part_that_is_quantised_when_it_is_read(
    family: str, quantization: str, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's tokens are its own with rows that transformers made: its tower has not been quantised."""
    asked = Asked(family)

    def told(adapter: str | None) -> list[int]:
        engine = engine_of(asked, kernels, quantization=quantization)
        assert engine.model.why_blind is None
        engine.add_request(asked.request("one", adapter, images_of(asked)[:2]))
        found = answers(engine)["one"]
        engine.close()
        return found

    own = [told(adapter) for adapter in (None, "text")]
    assert told("tower") != own[0]
    monkeypatch.setattr("chorus.core.media.tower.Tower", TransformersRows)
    assert [told(adapter) for adapter in (None, "text")] == own


def test_a_quantised_tower_is_refused_by_its_tensor(tmp_path: Path) -> None:
    """Its numbers would be read without their scales."""
    for number, form in enumerate(STORED):
        (root := tmp_path / str(number)).mkdir()
        quantised, _ = write_twins(root, "smolvlm", form, "tower")
        model = read_model_config(quantised)
        why = why_blind(EngineConfig(model=quantised), model, on_gpu=False)
        assert why is not None and "quantised, too: its tensor model." in why and "is stored as" in why


def test_bytes_of_a_tower_are_those_of_its_weights() -> None:
    for family in (*FAMILIES, "mistral3", "gemma4"):
        model = read_model_config(tiny(family))
        assert model.vision is not None
        tower = skeleton(tiny(family), model.architecture, model.vision)
        state = {name: each for name, each in tower.state_dict().items() if each.is_floating_point()}
        wanted = 2 * sum(each.numel() for name, each in state.items() if name.startswith(model.vision.modules))
        assert tower_bytes(tiny(family), model, torch.bfloat16) == wanted


def test_a_tower_that_lacks_a_tensor_is_not_read(tmp_path: Path) -> None:
    quantised, _ = write_twins(tmp_path, "smolvlm", "awq", "tower")
    model = read_model_config(quantised)
    assert model.vision is not None
    with pytest.raises(ValueError, match="which its tower needs"):
        Tower(quantised, model.architecture, model.vision, torch.float32)
