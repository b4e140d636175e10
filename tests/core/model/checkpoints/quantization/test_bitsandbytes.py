"""Checkpoints of bitsandbytes: as the library itself quantises and dequantises, and those that are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.narrow_bytes import bytes_saved_by_experts
from chorus.core.model.weights.weight_plan import NARROW, PACKED

from ....tiny_families import save_family
from .bnb_forms import bnb_4bit, bnb_int8
from .twins import MODULE, Form, Tensors, weights, write_twins

STATE = f"{MODULE}.weight.quant_state.bitsandbytes__nf4"
AGAIN = "; download or quantise the checkpoint again"


def library_form(kind: str, nested: bool) -> Form:
    """A form that the library quantises, and dequantises for the twin."""
    functional = pytest.importorskip("bitsandbytes.functional")

    def quantise(_: str, shape: tuple[int, int]) -> tuple[Tensors, torch.Tensor]:
        weight = torch.randn(shape)
        if kind == "int8":
            stored, scales, _ = functional.int8_vectorwise_quant(weight.half())
            return {"weight": stored, "SCB": scales}, functional.int8_vectorwise_dequant(stored, scales)
        stored, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=64)
        tensors = {f"weight.{end}": tensor for end, tensor in state.as_dict(packed=True).items()}
        return {"weight": stored, **tensors}, functional.dequantize_4bit(stored, state)

    # On the CPU the library dequantises rows that are shorter than a block wrongly.
    config = {"hidden_size": 64, "intermediate_size": 128}
    return replace(bnb_int8() if kind == "int8" else bnb_4bit(), quantise=quantise, config=config)


@pytest.mark.parametrize(("kind", "nested"), [("nf4", False), ("nf4", True), ("fp4", True), ("int8", False)])
def test_what_the_library_writes_is_read_as_the_library_does(tmp_path, kind, nested):
    twins = write_twins(tmp_path, library_form(kind, nested))
    for found, want in zip(*(weights(path, torch.float32) for path in twins), strict=True):
        assert found is want is None or torch.equal(found, want)


def refusal(root, form: Form, spoil: Callable[[Tensors], object] = lambda _: None) -> str:
    with pytest.raises(UnsupportedModel) as caught:
        list(weights(write_twins(root, form, spoil=spoil)[0]))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("form", "end", "value", "why"),
    [
        (bnb_4bit(), "weight.absmax", torch.ones(3), "has shape [3], config.json needs [4]"),
        (bnb_4bit(), "weight.absmax", torch.full((4,), torch.nan), "has scales that are not finite"),
        (bnb_4bit(), "weight", torch.ones(16, 16), "has shape [16, 16], config.json needs [32, 1]"),
        (bnb_4bit(), "weight.quant_map", torch.ones(8), "has shape [8], config.json needs [16]"),
        (bnb_4bit(nested=2), "weight.nested_absmax", torch.ones(5), "has shape [5], config.json needs [2]"),
        (bnb_4bit(nested=2), "weight.absmax", torch.ones(4), "is stored as F32; supported: U8"),
        (bnb_int8(), "SCB", torch.ones(4), "has shape [4], config.json needs [16]"),
        (bnb_int8(), "weight_format", torch.tensor([2], dtype=torch.uint8), "has the value 2, allowed are 0 to 0"),
    ],
)
def test_bad_tensors_are_named_with_the_mend(tmp_path, form, end, value, why):
    said = refusal(tmp_path, form, lambda tensors: tensors.update({f"{MODULE}.{end}": value}))
    assert f"tensor {MODULE}.{end} " in said and why in said and said.endswith(AGAIN)


@pytest.mark.parametrize(
    ("told", "why"),
    [
        (b"{", f"tensor {STATE} is not JSON"),
        (b'{"quant_type": "nf5", "blocksize": 64, "shape": [16, 16]}', f"{STATE}.quant_type is 'nf5': not supported"),
        (b'{"quant_type": "nf4", "blocksize": 0, "shape": [16, 16]}', f"{STATE}.blocksize is 0: a whole number"),
        (
            b'{"quant_type": "nf4", "blocksize": 64, "shape": [16, 16], "nested_offset": NaN}',
            f"{STATE}.nested_offset is nan: a finite number is needed",
        ),
        (b'{"quant_type": "nf4", "blocksize": 64, "shape": [16, 8]}', "says shape [16, 8], config.json needs [16, 16]"),
    ],
)
def test_a_state_that_is_not_as_described_is_named(tmp_path, told, why):
    state = torch.tensor(list(told), dtype=torch.uint8)
    assert why in refusal(tmp_path, bnb_4bit(), lambda tensors: tensors.update({STATE: state}))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"load_in_8bit": True}, "load_in_4bit is True: load_in_8bit is True; exactly one of the two must be true"),
        ({"load_in_2bit": True}, "quantization_config.load_in_2bit is True: unknown field"),
        ({"llm_int8_has_fp16_weight": True}, "llm_int8_has_fp16_weight is True: not supported"),
    ],
)
def test_fields_that_would_change_the_weights_are_refused_by_name(tmp_path, how: dict[str, Any], why):
    form = bnb_4bit()
    assert why in refusal(tmp_path, replace(form, how=form.how | how))


@pytest.mark.parametrize("family", ["qwen3-moe", "gpt-oss"])
@pytest.mark.parametrize("form", [bnb_4bit(), bnb_int8()], ids=["nf4", "int8"])
def test_experts_that_transformers_leaves_as_they_are(tmp_path, family, form):
    """It keeps all of a layer's in one parameter, which the library does not quantise, and no list names them."""
    for path in (quantised := tmp_path / "quantised", twin := tmp_path / "twin"):
        save_family(family, path)
    plain = load_file(twin / "model.safetensors")
    stored = dict(plain)
    for name, weight in list(plain.items()):
        if name.endswith("_proj.weight") and ".self_attn." in name:
            tensors, plain[name] = form.quantise(name, tuple(weight.shape))
            del stored[name]
            stored |= {f"{name.removesuffix('.weight')}.{end}": tensor for end, tensor in tensors.items()}
    save_file(plain, twin / "model.safetensors")
    save_file(stored, quantised / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": form.how}))
    for found, want in zip(*map(weights, (quantised, twin)), strict=True):
        assert found is want is None or torch.equal(found, want)
    model = read_model_config(quantised)
    assert {bytes_saved_by_experts(model, 2, plan) for plan in (PACKED, NARROW)} == {0}, "the configuration can't tell"
