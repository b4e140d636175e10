"""Experts as a GPU keeps them: the bits of a checkpoint of the dequantised values, in the bytes that planners count."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from chorus.core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from chorus.core.model.moe.experts import ExpertPack
from chorus.core.model.moe.narrow_experts import narrow_expert
from chorus.core.model.read_config import read_model_config
from chorus.core.model.weights.narrow_bytes import bytes_saved_by_experts, weight_bytes
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.shard import WHOLE, Shard
from chorus.core.model.weights.weight_plan import NARROW
from chorus.ops.gemm.narrow_weights import NarrowWeight

from ...tiny_families import save_family
from ..checkpoints.quantization.forms import FORMS
from ..checkpoints.quantization.integer_forms import compressed_integers, gptq
from ..checkpoints.quantization.test_forms import with_experts
from ..checkpoints.quantization.test_mxfp4 import HOW, write_mxfp4
from ..checkpoints.quantization.twins import Form, write_twins

pytestmark = pytest.mark.wide

CPU, DTYPE, FAMILY = torch.device("cpu"), torch.bfloat16, "Qwen3MoeForCausalLM"


def stacks(path, quantiser=None, shard=WHOLE, *, narrow: bool):
    """The experts of all layers, or a rank's share."""
    pack = ExpertPack(DTYPE, lambda weight: weight, lambda it: narrow_expert(it, DTYPE, CPU), NARROW.reads_expert)
    with open_weights(path, read_model_config(path), DTYPE, shard=shard, quantiser=quantiser) as weights:
        layers = [layer["experts"] for layer in weights.layers(pack_expert=pack if narrow else None)]
    experts = [each.stacked(DTYPE, CPU) for each in layers if each is not None]
    return [stack.data for each in experts for stack in (each.gate_up, each.down)]


def dense(weight):
    return weight.dense() if isinstance(weight, NarrowWeight) else weight


def wide(form: Form) -> Form:
    """Rows that groups of 64 divide."""
    return replace(form, config={"hidden_size": 128, "moe_intermediate_size": 64})


#: Name → the form, and the bits in which a GPU keeps it, or 0.
STORED = {
    "fp8 channels": (FORMS["fp8 channels"], 8),
    "fp8 blocks": (FORMS["fp8 blocks"], 0),
    "awq": (wide(FORMS["awq channels"]), 4),
    "gptq 2 bits": (wide(gptq(2, group=64, v2=True)), 4),
    "gptq act order": (FORMS["gptq act order"], 0),
    "bnb nf4": (FORMS["bnb nf4"], 0),
    "bnb int8": (FORMS["bnb int8"], 8),
    "packed, zero points": (wide(compressed_integers(group=64, symmetric=False)), 4),
    "int8": (FORMS["compressed int8"], 8),
    "nvfp4": (wide(FORMS["compressed nvfp4"]), 0),
    "mxfp4": (wide(FORMS["compressed mxfp4"]), 4),
}


@pytest.mark.parametrize("name", STORED)
def test_stored_forms(tmp_path, name):
    form, bits = STORED[name]
    routed = with_experts("fp8", FAMILY)
    mixture = replace(form, config=routed.config | form.config, plain=(*form.plain, *routed.plain))
    check(*write_twins(tmp_path, mixture, FAMILY), bits, float4=name == "mxfp4", is_told=not name.startswith("bnb"))


def check(quantised, twin, bits: int, *, float4: bool = False, is_told: bool = True) -> None:
    """is_told: the configuration tells that experts are quantised; otherwise plans count them in the model's dtype."""
    found, want = stacks(quantised, narrow=True), stacks(twin, narrow=False)
    for one, two in zip(found, want, strict=True):
        assert torch.equal(dense(one), two)
        assert (one.bits, one.float4) == (bits, float4) if bits else isinstance(one, torch.Tensor)
    kept = sum((each if is_told else dense(each)).nbytes for each in found)
    assert weight_bytes(read_model_config(quantised), 2).experts == kept


def test_mxfp4_in_stacks(tmp_path):
    """A checkpoint's own bytes: half a byte for a weight, and one for 32 of them."""
    quantised, twin = write_mxfp4(tmp_path)
    check(quantised, twin, 4, float4=True)
    tensors = load_file(quantised / "model.safetensors")
    stored = sum(each.nbytes for name, each in tensors.items() if name.endswith(("_blocks", "_scales")))
    assert weight_bytes(read_model_config(quantised), 2).experts == stored


def test_experts_of_a_layer_that_are_stored_in_two_ways_are_dequantised(tmp_path):
    """Some in 4 bits and some plain; the layer's other stack stays narrow."""
    routed, other = with_experts("fp8", FAMILY), "experts.1.down_proj"
    form = wide(FORMS["awq channels"])
    form = replace(form, config=routed.config | form.config, plain=(*routed.plain, other))
    form = replace(form, how=form.how | {"modules_to_not_convert": ["experts.1.down_proj"]})
    quantised, twin = write_twins(tmp_path, form, FAMILY)
    found, want = stacks(quantised, narrow=True), stacks(twin, narrow=False)
    assert [type(each) for each in found] == [NarrowWeight, torch.Tensor] * 2
    assert all(torch.equal(dense(one), two) for one, two in zip(found, want, strict=True))
    assert weight_bytes(read_model_config(quantised), 2).experts == sum(each.nbytes for each in found)


@pytest.mark.parametrize("name", ["fp8 channels", "awq", "mxfp4"])
def test_ranks_have_shares_of_the_same_weights(tmp_path, name):
    """Columns of down may begin within a group: such a share is kept in smaller ones, or dequantised."""
    form, routed = STORED[name][0], with_experts("fp8", FAMILY)
    mixture = replace(form, config=routed.config | form.config, plain=(*form.plain, *routed.plain))
    quantised, twin = write_twins(tmp_path, mixture, FAMILY)
    config = read_model_config(quantised)
    for shard in (Shard(0, 2), Shard(1, 2)):
        found, want = (stacks(path, shard=shard, narrow=path is quantised) for path in (quantised, twin))
        assert all(torch.equal(dense(one), two) for one, two in zip(found, want, strict=True))
        saved = sum(two.nbytes - one.nbytes for one, two in zip(found, want, strict=True))
        assert bytes_saved_by_experts(config, 2, NARROW, shard) == saved > 0


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_quantised_while_they_are_read(tmp_path, name):
    save_family("qwen3.5-moe", tmp_path, torch.bfloat16, moe_intermediate_size=64)
    quantiser = RoundToNearest(name)
    found, plain = stacks(tmp_path, quantiser, narrow=True), stacks(tmp_path, narrow=False)
    for one, two in zip(found, plain, strict=True):
        want = torch.stack([quantiser(each).dequantised() for each in dense(two)])
        assert one.bits == quantiser.bits
        assert torch.equal(dense(one), want.to(DTYPE))
    counted = weight_bytes(read_model_config(tmp_path), 2, quantiser).experts
    assert counted == sum(each.nbytes for each in found)


def test_gpt_oss_20b_takes_its_files_bytes(tmp_path):
    """24 layers of 32 experts, three matrices of 2,880 by 2,880 each: 17 bytes for 32 weights."""
    save_family("gpt-oss", tmp_path)
    large = {"hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24, "num_local_experts": 32}
    config = json.loads((tmp_path / "config.json").read_text()) | large | {"quantization_config": HOW}
    config["layer_types"] = ["sliding_attention", "full_attention"] * 12
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert weight_bytes(read_model_config(tmp_path), 2).experts == 24 * 32 * 3 * 2880 * 2880 * 17 // 32
