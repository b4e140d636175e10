"""DoRA's magnitudes and biases in an adapter's files, under all names that PEFT gives them."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch

from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter
from chorus.memory.files.identity import with_content, with_effect
from chorus.memory.pages.adapter_layout import VectorTarget

from ...tables import TINY, TINY_PATHS
from ..conftest import DIMS, LAYERS, module_key

QV = ("q_proj", "v_proj")
BIASED = replace(TINY_PATHS, biased=(("q_proj", "k_proj", "v_proj"),) * LAYERS)


def vector(it, layer, module, end, value=None):
    outputs = DIMS[module][1]
    values = torch.full((outputs,), value) if value is not None else torch.rand(outputs)
    it.tensors[f"base_model.model.{module_key(layer, module)}.{end}"] = values


def inspected(it, path, modules=BIASED):
    return inspect_adapter(it.write(path), modules)


@pytest.mark.parametrize("end", ["lora_magnitude_vector", "lora_magnitude_vector.weight"])
def test_magnitudes_of_every_target(adapter_draft, tmp_path, end):
    it = adapter_draft(QV, use_dora=True)
    for layer in range(LAYERS):
        for module in QV:
            vector(it, layer, module, end)
    manifest = inspected(it, tmp_path)
    assert manifest.vectors == tuple(
        VectorTarget(layer, module, has_magnitude=True) for layer in range(LAYERS) for module in QV
    )
    assert manifest.num_params(TINY) == sum(each.numel() for each in it.tensors.values())


@pytest.mark.parametrize("end", ["bias", "base_layer.bias"])
@pytest.mark.parametrize("bias", ["all", "lora_only"])
def test_biases_with_and_without_lora(adapter_draft, tmp_path, end, bias):
    """A bias of a module without LoRA is the adapter's, too."""
    it = adapter_draft(("o_proj",), bias=bias, layers=(1,), layers_to_transform=[1])
    vector(it, 1, "k_proj", "bias")
    vector(it, 2, "q_proj", end)
    manifest = inspected(it, tmp_path)
    assert manifest.vectors == (
        VectorTarget(1, "k_proj", has_bias=True),
        VectorTarget(2, "q_proj", has_bias=True),
    )
    assert manifest.targets == ("q_proj", "k_proj", "o_proj")


def test_a_base_model_without_biases_has_none_saved(adapter_draft, tmp_path):
    assert inspected(adapter_draft(QV, bias="all"), tmp_path).vectors == ()


def test_a_bias_that_the_base_model_has_not(adapter_draft, tmp_path):
    it = adapter_draft(("o_proj",), bias="all")
    vector(it, 0, "o_proj", "base_layer.bias")
    with pytest.raises(AdapterFormatError, match=r"o_proj\.bias is a bias of o_proj in layer 0, which the base model"):
        inspected(it, tmp_path)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("mlp.gate.e_score_correction_bias", "a router's correction, .* load and save the adapter with a current PEFT"),
        ("linear_attn.dt_bias", "a bias of something other than a projection, .* train with bias='lora_only'"),
        ("mlp.experts.gate_up_proj_bias", "a bias of something other than a projection, .* bias='lora_only' or 'none'"),
        ("input_layernorm.bias", "a bias of something other than a projection, .* bias='lora_only' or 'none'"),
    ],
)
@pytest.mark.parametrize("bias", ["all", "none"])
def test_other_biases_that_peft_saved_are_refused_by_what_they_are(adapter_draft, tmp_path, name, why, bias):
    """Older versions of PEFT save with bias='all' whatever has `bias` in its name, also what is not trained; every
    version reads it from a file.
    """
    it = adapter_draft(("o_proj",), bias=bias)
    it.tensors[f"base_model.model.model.layers.1.{name}"] = torch.zeros(4)
    if name.endswith(".bias") and bias == "none":
        why = "is unexpected: adapter_config.json has bias 'none'"
    with pytest.raises(AdapterFormatError, match=rf"{re.escape(name)}' is {why.removeprefix('is ')}"):
        inspected(it, tmp_path)


@pytest.mark.parametrize("end", ["lora_magnitude_vector", "lora_B.bias"])
def test_a_vector_of_a_module_that_is_no_target(adapter_draft, tmp_path, end):
    it = adapter_draft(("o_proj",), use_dora="magnitude" in end, lora_bias="bias" in end)
    for layer in range(LAYERS):
        vector(it, layer, "o_proj", end)
    vector(it, 0, "k_proj", end)
    with pytest.raises(AdapterFormatError, match=r"k_proj.* is not targeted by adapter_config\.json"):
        inspected(it, tmp_path)


def test_content_covers_every_vector(adapter_draft, tmp_path):
    """Other magnitudes are another adapter; another name for them is not."""

    def content(name, value, end="lora_magnitude_vector"):
        it = adapter_draft(("o_proj",), use_dora=True, seed=3)
        for layer in range(LAYERS):
            vector(it, layer, "o_proj", end, value)
        return with_content(inspected(it, tmp_path / name)).content_hash

    first = content("a", 1.0)
    assert content("b", 1.0, "lora_magnitude_vector.weight") == first
    assert content("c", 2.0) != first
    plain = with_content(inspected(adapter_draft(("o_proj",), seed=3), tmp_path / "plain"))
    assert plain.content_hash != first


def test_vectors_have_an_effect_without_lora(adapter_draft, tmp_path):
    it = adapter_draft(("o_proj",), use_dora=True, lora_alpha=0)
    for layer in range(LAYERS):
        vector(it, layer, "o_proj", "lora_magnitude_vector")
    assert with_effect(inspected(it, tmp_path)).no_effect is False
