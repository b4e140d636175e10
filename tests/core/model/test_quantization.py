"""Quantised checkpoints have the weights of a plain checkpoint that holds the dequantised values."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest
import torch
from safetensors.torch import save_file

from chorus.core.model.config import UnsupportedModel
from chorus.core.model.read_config import read_model_config
from chorus.core.model.shard import Shard
from chorus.core.model.weights import WeightLoader, sources, tensor_shapes

CONFIG = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
OUT = "model.layers.1.self_attn.o_proj.weight"


def write(path, tensors, **config):
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if tensors:
        save_file(tensors, path / "model.safetensors")
    return path


def quantise(weight, scheme):
    """Stored values, scales and the float32 product, written out element by element."""
    rows, columns = weight.shape
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": (5, 7)}[scheme]
    scale = torch.empty(-(-rows // height), -(-columns // width))
    stored, product = torch.empty_like(weight).to(torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            at = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
            scale[i, j] = weight[at].abs().max() / 448
            stored[at] = (weight[at] / scale[i, j]).to(torch.float8_e4m3fn)
            product[at] = stored[at].float() * scale[i, j]
    return stored, scale.reshape(()) if scheme == "tensor" else scale, product


@pytest.fixture
def twins(tmp_path):
    def make(architecture="LlamaForCausalLM", scheme="block", plain=(), spoil=lambda _: None):
        arch = {"architectures": [architecture]}
        model = read_model_config(write(tmp_path / "twin", {}, **arch))
        names, stacked = sources(model, ()), {}
        torch.manual_seed(0)
        for part, shape in tensor_shapes(model).items():
            stacked.setdefault(names[part].name, []).append(torch.randn(shape))
        twin = {name: torch.cat(parts) for name, parts in stacked.items()}
        quantised = dict(twin)
        for name, weight in list(twin.items()):
            if ".layers." in name and weight.ndim == 2 and not any(each in name for each in plain):
                quantised[name], scale, twin[name] = quantise(weight, scheme)
                quantised[name + ("_scale_inv" if scheme == "block" else "_scale")] = scale
        spoil(quantised)
        how = {"quant_method": "fp8", "modules_to_not_convert": list(plain)}
        how |= {"weight_block_size": [5, 7]} if scheme == "block" else {}
        write(tmp_path / "twin", twin, **arch)
        return write(tmp_path / "quantised", quantised, **arch, quantization_config=how), tmp_path / "twin"

    return make


def weights(path, dtype=torch.bfloat16, **options):
    loader = WeightLoader(path, read_model_config(path), dtype, **options)
    return [getattr(layer, f.name) for layer in loader.layers() for f in fields(layer)]


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM", "Phi3ForCausalLM"])
@pytest.mark.parametrize("scheme", ["tensor", "channel", "block"])
def test_fp8_has_the_bits_of_its_dequantised_twin(twins, architecture, scheme):
    quantised, twin = twins(architecture, scheme, plain=["mlp.down_proj"])
    for options in ({}, {"shard": Shard(0, 2)}, {"shard": Shard(1, 2)}, {"dtype": torch.float32}):
        for found, want in zip(weights(quantised, **options), weights(twin, **options), strict=True):
            assert (found is None and want is None) or torch.equal(found, want)


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda t: t.pop(OUT + "_scale_inv"), "o_proj.weight_scale_inv is missing"),
        (lambda t: t.update({OUT + "_scale_inv": torch.ones(2, 2)}), r"o_proj.weight_scale_inv has shape \[2, 2\]"),
        (lambda t: t[OUT + "_scale_inv"].fill_(torch.nan), "o_proj.weight_scale_inv has scales that are not finite"),
        (lambda t: t.update({OUT: torch.ones(16, 16)}), "o_proj.weight is stored as F32; supported: F8_E4M3"),
    ],
)
def test_bad_scales_are_refused_by_name(twins, spoil, why):
    quantised, _ = twins(spoil=spoil)
    with pytest.raises(UnsupportedModel, match=why):
        weights(quantised)
