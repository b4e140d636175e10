"""Ranks read their shares of Gated DeltaNet, heads of keys with the heads of values that they serve, and of experts."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.executors.ranks import weights_of_rank
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.recurrent import GatedDeltaSpec
from chorus.core.model.weights.layer_weights import LayerWeights
from chorus.core.model.weights.narrow_bytes import kept_bytes
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.shard import WHOLE, Shard
from chorus.core.model.weights.tensor_parts import end_slots

from ...tiny_families import EXPERTS, save_family
from ..checkpoints.quantization.test_forms import with_experts
from ..checkpoints.quantization.test_mxfp4 import write_mxfp4
from ..checkpoints.quantization.twins import weights as every_tensor
from ..checkpoints.quantization.twins import write_twins

pytestmark = pytest.mark.wide


def quantise(path: Path) -> None:
    """Store the inputs of Gated DeltaNet in FP8, with a scale for each row."""
    tensors = load_file(path / "model.safetensors")
    for name in [name for name in tensors if "in_proj" in name]:
        scale = tensors[name].abs().amax(1, keepdim=True) / 448
        tensors[name + "_scale"] = scale
        tensors[name] = (tensors[name] / scale).to(torch.float8_e4m3fn)
    save_file(tensors, path / "model.safetensors")
    raw = json.loads((path / "config.json").read_text())
    plain = [name.removesuffix(".weight") for name in tensors if name.endswith("_proj.weight")]
    raw["quantization_config"] = {"quant_method": "fp8", "modules_to_not_convert": plain}
    (path / "config.json").write_text(json.dumps(raw))


def first_layer(path: Path, shard: Shard = WHOLE) -> LayerWeights:
    with open_weights(path, read_model_config(path), torch.float32, shard=shard) as weights:
        return next(weights.layers())


def joined(parts: list[torch.Tensor], sizes: list[int], dim: int = 0) -> torch.Tensor:
    """Both ranks' shares of sections of these sizes, section by section."""
    split = [part.split([size // 2 for size in sizes], dim) for part in parts]
    return torch.cat([part for pair in zip(*split, strict=True) for part in pair], dim)


def section_sizes(delta: GatedDeltaSpec) -> tuple[list[int], list[int]]:
    """Of the convolution's channels, and of the input projection."""
    channels = [delta.k_size, delta.k_size, delta.v_size]
    return channels, [*channels, delta.v_size, delta.num_v_heads, delta.num_v_heads]


@pytest.mark.parametrize("stored", ["plain", "fp8"])
def test_every_element_is_on_one_rank(tmp_path, stored):
    """But for those of the norm, which every rank has."""
    save_family("qwen3.5", tmp_path)
    if stored == "fp8":
        quantise(tmp_path)
    delta = read_model_config(tmp_path).recurrent
    assert delta is not None
    channels, inputs = section_sizes(delta)
    whole, shares = first_layer(tmp_path), [first_layer(tmp_path, Shard(rank, 2)) for rank in range(2)]
    assert torch.equal(joined([each["qkv"] for each in shares], inputs), whole["qkv"])
    assert torch.equal(torch.cat([each["o"] for each in shares], 1), whole["o"])
    assert torch.equal(joined([each["recurrent"].conv for each in shares], channels, 1), whole["recurrent"].conv)
    for name in ("dt_bias", "a_log"):
        assert torch.equal(
            torch.cat([getattr(each["recurrent"], name) for each in shares]), getattr(whole["recurrent"], name)
        )
    assert all(torch.equal(each["recurrent"].norm, whole["recurrent"].norm) for each in shares)


def halves(parts: list[torch.Tensor]) -> torch.Tensor:
    """All ranks' shares of gate and up, or of their biases: first all of gate, then all of up."""
    return torch.cat([part.chunk(2)[half] for half in range(2) for part in parts])


def form_of(root: Path, form: str) -> Path:
    """A checkpoint of a mixture of this form: a family's own, quantised, or MXFP4."""
    if form == "mxfp4":
        return write_mxfp4(root)[0]
    if form in EXPERTS:
        save_family(form, root)
        return root
    return write_twins(root, with_experts(form, "Qwen3MoeForCausalLM"), "Qwen3MoeForCausalLM")[0]


@pytest.mark.parametrize(
    ("form", "size"),
    [
        ("qwen3.5-moe", 2),  # it has two heads of keys
        *itertools.product(("glm-4-moe", "granite-moe", "gpt-oss", "mxfp4", "fp8 blocks", "bnb nf4"), (2, 4)),
    ],
)
def test_every_column_of_an_expert_is_on_one_rank(tmp_path, form, size):
    """Also where ranks share a block of numbers with one scale. Each rank has the router, the first has down's bias."""
    path = form_of(tmp_path, form)
    config = read_model_config(path)

    def read(shard: Shard) -> LayerWeights:
        with open_weights(path, config, torch.float32, shard=shard) as weights:
            return list(weights.layers())[-1]

    layer, *shares = (read(shard) for shard in (WHOLE, *(Shard(rank, size) for rank in range(size))))
    whole, parts = layer["experts"], [share["experts"] for share in shares]
    assert whole is not None and len(parts) == size
    for expert in range(config.num_experts):
        assert torch.equal(halves([part.gate_up[expert] for part in parts]), whole.gate_up[expert])
        assert torch.equal(torch.cat([part.down[expert] for part in parts], 1), whole.down[expert])
        if whole.gate_up_bias is not None:
            biases = [part.gate_up_bias[expert] for part in parts if part.gate_up_bias is not None]
            assert torch.equal(halves(biases), whole.gate_up_bias[expert])
            assert parts[0].down_bias is not None and whole.down_bias is not None
            assert torch.equal(parts[0].down_bias[expert], whole.down_bias[expert])
    assert {part.down_bias is None for part in parts[1:]} == {True}
    assert all(torch.equal(part.router.to_dense(), whole.router.to_dense()) for part in parts)
    if whole.shared_gate_up is not None:
        assert torch.equal(halves([part.shared_gate_up for part in parts]), whole.shared_gate_up)
        assert torch.equal(torch.cat([part.shared_down for part in parts], 1), whole.shared_down)
    if "sinks" in layer:
        assert torch.equal(torch.cat([share["sinks"] for share in shares]), layer["sinks"])


@pytest.mark.parametrize("family", EXPERTS)
def test_weights_of_ranks_are_those_that_are_read(tmp_path, family):
    """Counted before they are read, and by the formula of docs/explanation/memory.md but for biases and norms."""
    save_family(family, tmp_path)
    config = read_model_config(tmp_path)
    embeddings = config.vocab_size * config.hidden_size
    for size in (1, 2):
        counted = [kept_bytes(config, 1, shard=Shard(rank, size)) for rank in range(size)]
        for rank, count in enumerate(counted):
            *layers, head = every_tensor(tmp_path, torch.float32, shard=Shard(rank, size))
            read = sum(each.numel() for each in layers if each is not None)
            head_weights = 0 if config.tie_word_embeddings or head is None else head.numel()
            norm = config.hidden_size * (1 + config.norm.biased)
            tokens = Shard(rank, size).of_vocab(config)
            bias = (tokens.stop - tokens.start) * config.head_bias
            joins = sum(math.prod(each.shape) for slot in end_slots(config) for each in slot.tensors)
            assert count == read + embeddings + norm + head_weights + bias + joins
        assert weights_of_rank(config, size) == pytest.approx(counted[0], rel=0.04)
