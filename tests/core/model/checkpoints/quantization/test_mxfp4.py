"""MXFP4 experts of gpt-oss are the values that transformers dequantises, bit by bit; bad files are named in a line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights import weight_loader as loading
from chorus.core.model.weights.open_weights import open_weights

from ....test_families import executor_of, logits_of
from ....tiny_families import save_family
from .twins import Tensors, weights

pytestmark = pytest.mark.wide

HOW = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
STACK = "model.layers.1.mlp.experts.gate_up_proj"


def write_mxfp4(root: Path, spoil: Callable[[Tensors], object] = lambda _: None, **how: object) -> tuple[Path, Path]:
    """A checkpoint as gpt-oss' are, which `spoil` may change, and its twin in bfloat16."""
    quantised, twin = root / "quantised", root / "twin"
    for path in (quantised, twin):
        save_family("gpt-oss", path, torch.bfloat16)
    plain, packed = load_file(twin / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name, tensor in plain.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            packed[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32)
        packed[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=generator)
        packed[f"{name}_scales"] = torch.randint(121, 126, shape, dtype=torch.uint8, generator=generator)
        plain[name] = convert_moe_packed_tensors(packed[f"{name}_blocks"], packed[f"{name}_scales"])
    spoil(packed)
    save_file({name: tensor.contiguous() for name, tensor in packed.items()}, quantised / "model.safetensors")
    save_file(plain, twin / "model.safetensors")
    config = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**config, "quantization_config": {**HOW, **how}}))
    return quantised, twin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("chunk", [loading._CHUNK, 640])  # noqa: SLF001
def test_weights_have_the_bits_of_the_dequantised_twin(tmp_path, monkeypatch, dtype, chunk):
    monkeypatch.setattr(loading, "_CHUNK", chunk)
    monkeypatch.setattr(loading, "_ROWS", 1)
    pairs = zip(*(weights(path, dtype) for path in write_mxfp4(tmp_path)), strict=True)
    assert all((one is None and other is None) or torch.equal(one, other) for one, other in pairs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_logits_have_the_bits_of_the_twins(tmp_path, dtype):
    prompts = [[5, 6, 7], [8, 9], list(range(20, 90))]
    quantised, twin = (executor_of(path, dtype=dtype, cpu_kernels="torch") for path in write_mxfp4(tmp_path))
    found, want = logits_of(quantised, prompts), logits_of(twin, prompts)
    assert torch.equal(found, want)
    assert found.std() > 0


def test_bytes_to_read_are_those_of_the_file(tmp_path):
    quantised, _ = write_mxfp4(tmp_path)
    read = []
    with open_weights(quantised, read_model_config(quantised), torch.bfloat16) as found:
        found.advance = read.append
        list(found.layers())
        found.norm()
        found.lm_head(found.embed())
        stored = sum(tensor.nbytes for tensor in load_file(quantised / "model.safetensors").values())
        assert found.num_bytes == stored
    assert 0.99 * stored < sum(read) <= stored


def test_a_model_says_its_form(tmp_path):
    model = read_model_config(write_mxfp4(tmp_path)[0])
    assert model.weight_format is not None and model.weight_format.title == "MXFP4"


def setting(end: str, value: torch.Tensor) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.update({STACK + end: value})


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda t: t.pop(f"{STACK}_blocks"), f"tensor {STACK}_blocks is missing"),
        (lambda t: t.pop(f"{STACK}_scales"), f"tensor {STACK}_scales is missing"),
        (lambda t: t.pop(f"{STACK}_bias"), "mlp.experts.0.gate_proj.bias is missing"),
        (
            setting("_scales", torch.ones(8, 128, 3, dtype=torch.uint8)),
            f"{STACK}_scales has shape [8, 128, 3], config.json needs [8, 128, 2]",
        ),
        (
            setting("_blocks", torch.ones(8, 128, 2, 15, dtype=torch.uint8)),
            f"{STACK}_blocks has shape [8, 128, 2, 15], config.json needs [8, 128, 2, 16]",
        ),
        (setting("_scales", torch.ones(8, 128, 2)), f"{STACK}_scales is stored as F32; supported: U8"),
        (
            setting("_scales", torch.full((8, 128, 2), 255, dtype=torch.uint8)),
            f"{STACK}_scales has the value 255, allowed are 0 to 254",
        ),
        (setting("_zeros", torch.ones(2)), f"tensor {STACK}_zeros has no place in this model"),
    ],
)
def test_bad_tensors_are_named(tmp_path, spoil, why):
    with pytest.raises(UnsupportedModel) as caught:
        list(weights(write_mxfp4(tmp_path, spoil)[0]))
    assert why in str(caught.value) and str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_told(tmp_path):
    quantised, _ = write_mxfp4(tmp_path)
    file = quantised / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UnsupportedModel, match=r"safetensors: cannot be read: .*; download the checkpoint again"):
        list(weights(quantised))


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ({"bits": 4}, "quantization_config.bits is 4: unknown field"),
        ({"modules_to_not_convert": ["re:("]}, "is not a regular expression"),
        ({"modules_to_not_convert": ["model.layers.1.mlp.experts"]}, f"tensor {STACK} is missing"),
    ],
)
def test_fields_that_do_not_agree_with_the_weights_are_refused_by_name(tmp_path, how, why):
    with pytest.raises(UnsupportedModel) as caught:
        list(weights(write_mxfp4(tmp_path, **how)[0]))
    assert why in str(caught.value)
