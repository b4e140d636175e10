"""Towers in bfloat16, with and without adapters: rows near those of transformers and peft, also in float32."""

from __future__ import annotations

import pytest
import torch

from chorus.core.config import EngineConfig
from chorus.core.media.processor import ImageProcessor, Prepared
from chorus.core.media.serving import with_tower
from chorus.core.media.tower import Tower, rows_of
from chorus.core.media.tower_adapter import read_changes
from chorus.core.model.read_config import read_model_config
from chorus.memory.files.format import inspect_adapter

from ...conftest import quiet
from . import tiny_mrope
from .seeing_families import SEEING
from .test_served_images import picture
from .tiny_vision import needs_vision, reference, tiny

pytestmark = [pytest.mark.native(needed=False), pytest.mark.vision, needs_vision]

FEW = ("smolvlm", "mistral3", "gemma3", "gemma4", "qwen2_5_vl")
FAMILIES = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.wide) for name in (*SEEING, *tiny_mrope.FAMILIES)
]
NEAR = 0.02
"""Of the same modules in the same dtype, whose sums may be in another order."""
APART = 0.15
"""Of bfloat16 and float32: these towers have large weights, and eight bits of a mantissa through some ten layers."""


@quiet()
def theirs(family: str, adapter: str | None, prepared: Prepared, dtype: torch.dtype) -> torch.Tensor:
    """The rows of transformers and peft."""
    from peft import PeftModel

    model = reference(tiny(family), family, dtype)
    if adapter is not None:
        path = str(tiny(family) / "adapters" / adapter)
        model = PeftModel.from_pretrained(model, path, autocast_adapter_dtype=False).eval().base_model.model
    spec = read_model_config(tiny(family)).vision
    assert spec is not None
    given = {name: prepared.tensors[name] for name in spec.arguments if name in prepared.tensors}
    given = {name: each.to(dtype) if each.is_floating_point() else each for name, each in given.items()}
    with torch.inference_mode():
        return rows_of(model.model.get_image_features(**given), spec, prepared.marks).float()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """Relative to the other's norm."""
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("adapter", [None, "tower"])
@pytest.mark.parametrize("family", FAMILIES)
def test_rows_are_near_those_of_transformers(family: str, adapter: str | None) -> None:
    path = tiny(family)
    model = read_model_config(path)
    assert model.vision is not None
    prepared = ImageProcessor(path).of_image(picture(3, (70, 50)))
    changes = None
    if adapter is not None:
        modules = with_tower(EngineConfig(model=path), model).module_paths
        changes = read_changes(inspect_adapter(path / "adapters" / adapter, modules))
        assert changes is not None and changes.modules
    tower = Tower(path, model.architecture, model.vision, torch.bfloat16)
    own = tower.encode(prepared.tensors, changes, prepared.marks)
    assert own.dtype == torch.bfloat16
    assert distance(own.float(), theirs(family, adapter, prepared, torch.bfloat16)) <= NEAR
    exact = theirs(family, adapter, prepared, torch.float32)
    assert distance(own.float(), exact) <= APART
    if adapter is not None:
        assert distance(exact, theirs(family, None, prepared, torch.float32)) > APART, "the adapter changes more"
