"""An adapter on a module past whose adapters transformers computes is served without it, or refused."""

from __future__ import annotations

import pytest
import torch

from chorus.core.model.specs.selective_scan import SelectiveScanSpec
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.module_paths import ModulePaths
from chorus.memory.pages.projections import Projections

from ...tables import mixer_projections
from ..conftest import Draft

LAYERS, RANK = 2, 3
PATHS = ModulePaths(Projections((mixer_projections(SelectiveScanSpec(32, state_size=8, rank=4), 16),) * LAYERS))


def draft(*modules: str, **fields) -> Draft:
    """An adapter on some modules, whose B is zero in `dt_proj` alone."""
    tensors = {}
    for layer in range(LAYERS):
        for name in modules:
            own, key = PATHS.projections[name], f"base_model.model.model.layers.{layer}.mamba.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(RANK, own.inputs)
            b = torch.zeros if name == "dt_proj" else torch.randn
            tensors[f"{key}.lora_B.weight"] = b(own.outputs, RANK)
    return Draft({"peft_type": "LORA", "r": RANK, "target_modules": [*modules], **fields}, tensors)


def refusal(path) -> str:
    with pytest.raises(AdapterFormatError) as caught:
        inspect_adapter(path, PATHS)
    return str(caught.value)


def test_zeros_are_left_out(tmp_path):
    manifest = inspect_adapter(draft("in_proj", "x_proj", "dt_proj", "out_proj").write(tmp_path), PATHS)
    assert manifest.targets == ("in_proj", "x_proj", "out_proj")
    assert manifest.untrained == ("dt_proj",)


@pytest.mark.parametrize("value", [1e-30, float("nan")])
def test_other_values_are_refused(tmp_path, value):
    it = draft("in_proj", "dt_proj")
    name = "base_model.model.model.layers.1.mamba.dt_proj.lora_B.weight"
    it.tensors[name][7, 2] = value
    text = refusal(it.write(tmp_path))
    assert (
        f"tensor {name}, of dt_proj of layer 1, is not zero. transformers multiplies by the weight of dt_proj" in text
    )
    assert text.endswith("Train without dt_proj in target_modules")


@pytest.mark.parametrize(
    ("fields", "end"), [({"use_dora": True}, "lora_magnitude_vector"), ({"lora_bias": True}, "lora_B.bias")]
)
def test_vectors_of_peft_s_layer_are_refused(tmp_path, fields, end):
    it = draft("in_proj", "dt_proj", **fields)
    for name, tensor in [*it.tensors.items()]:
        if name.endswith("lora_B.weight"):
            it.tensors[name.replace("lora_B.weight", end)] = torch.ones(len(tensor))
    assert "a bias of LoRA or a scale is on dt_proj of layer 0" in refusal(it.write(tmp_path))


def test_a_bias_is_the_model_s_own(tmp_path):
    """PEFT trains it in place, and transformers adds it."""
    it = draft("in_proj", "dt_proj", bias="lora_only")
    for layer in range(LAYERS):
        it.tensors[f"base_model.model.model.layers.{layer}.mamba.dt_proj.bias"] = torch.randn(32)
    manifest = inspect_adapter(it.write(tmp_path), PATHS)
    assert [(each.module, each.has_bias) for each in manifest.vectors] == [("dt_proj", True)] * LAYERS
    assert manifest.targets == ("in_proj", "dt_proj")


def test_an_adapter_of_nothing_else_is_refused(tmp_path):
    assert "the adapter is on dt_proj alone, and so it is the base model" in refusal(draft("dt_proj").write(tmp_path))
