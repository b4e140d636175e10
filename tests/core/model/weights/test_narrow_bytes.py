"""Bytes that a planner counts are those that a GPU's loader keeps, for every form of quantised weights."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from chorus.core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.kept_weights import matrix_pack
from chorus.core.model.weights.narrow_bytes import weight_bytes
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.weight_plan import NARROW
from chorus.ops.gemm.narrow_weights import NarrowWeight

from ...tiny_families import save_family
from ..checkpoints.quantization.forms import FORMS
from ..checkpoints.quantization.integer_forms import awq, compressed_integers, gptq
from ..checkpoints.quantization.twins import write_twins

pytestmark = pytest.mark.wide

#: Rows that groups of 64 and 128 divide.
WIDE = {"hidden_size": 128, "intermediate_size": 256}

MATRICES = "qkv", "o", "gate_up", "down"

WIDE_FORMS = {
    "fp8": FORMS["fp8 channels"],
    "fp8, part": replace(
        FORMS["fp8"], plain=("mlp.down_proj",), how={**FORMS["fp8"].how, "ignored_layers": ["mlp.down_proj"]}
    ),
    "awq": awq(64),
    "gptq": gptq(group=128),
    "gptq act order": gptq(group=64, act_order=True),
    "gptq 8 bits": gptq(8, group=64),
    "packed": compressed_integers(group=64),
    "packed, zero points": compressed_integers(group=64, symmetric=False),
    "int8": FORMS["compressed int8"],
    "bnb int8": FORMS["bnb int8"],
    "bnb nf4": FORMS["bnb nf4"],
    "nvfp4": FORMS["compressed nvfp4"],
    "mxfp4": FORMS["compressed mxfp4"],
}


def kept_bytes(path, quantiser=None):
    """Of the projections of layers, and of those in the model's dtype that are narrow."""
    model, dtype = read_model_config(path), torch.bfloat16
    with open_weights(path, model, dtype, quantiser=quantiser) as weights:
        weights.plan = NARROW
        pack = matrix_pack(weights.plan, torch.device("cpu"), dtype, packs=False)
        parts = [layer[name] for layer in weights.layers(pack) for name in MATRICES]
    narrow = [each for each in parts if isinstance(each, NarrowWeight)]
    return sum(each.nbytes for each in parts), sum(2 * each.shape.numel() for each in narrow)


@pytest.mark.parametrize("name", FORMS)
def test_of_every_form(tmp_path, name):
    path, _ = write_twins(tmp_path, FORMS[name])
    found = weight_bytes(read_model_config(path), 2)
    assert (found.projections, found.dense) == kept_bytes(path)


@pytest.mark.parametrize("name", WIDE_FORMS)
def test_of_groups_that_a_gpu_can_keep(tmp_path, name):
    form = replace(WIDE_FORMS[name], config=WIDE)
    path, twin = write_twins(tmp_path, form)
    found = weight_bytes(read_model_config(path), 2)
    assert (found.projections, found.dense) == kept_bytes(path)
    plain = weight_bytes(read_model_config(twin), 2)
    assert (plain.dense, plain.head, plain.others) == (0, found.head, found.others)
    assert (found.dense == 0) == (name in ("gptq act order", "bnb nf4", "nvfp4"))


@pytest.mark.parametrize("family", ["qwen3.5-moe", "glm-4-moe"])
def test_of_a_mixture(tmp_path, family):
    """Its experts are kept, the shared one and the router are dequantised: see `test_narrow_experts`."""
    save_family(family, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "fp8"}}))
    model = read_model_config(tmp_path)
    every = [each for layer in model.projections.layers for each in layer]
    found = weight_bytes(model, 2)
    assert found.experts == sum(each.num_weights + 4 * each.experts * each.outputs for each in every if each.experts)
    assert found.dense == 2 * sum(each.num_weights for each in every if not each.is_of_mixture)


@pytest.mark.parametrize("form", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("lm_head", [False, True])
def test_of_weights_that_are_quantised_while_they_are_read(tmp_path, form, lm_head):
    _, path = write_twins(tmp_path, replace(FORMS["awq"], config=WIDE))
    quantiser = RoundToNearest(form, lm_head)
    found = weight_bytes(read_model_config(path), 2, quantiser)
    assert (found.projections, found.dense) == kept_bytes(path, quantiser)
    assert found.head == (56 * (64 if form == "int4" else 128) + 56 * 4 if lm_head else 2 * 56 * 128)
