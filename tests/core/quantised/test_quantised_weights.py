"""Weights that are quantised while they are read: bits, bounds, memory, and what is refused."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.executors.cpu import CpuExecutor
from chorus.core.model.checkpoints.quantization.round_to_nearest import RoundToNearest
from chorus.core.model.program.native_decoder import PackedWeights
from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.narrow_bytes import kept_bytes
from chorus.core.model.weights.open_weights import open_weights
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.weight_loader import WeightLoader
from chorus.core.model.weights.weight_plan import PACKED
from chorus.perf.bench.models import random_model
from chorus.perf.bench.models.sizes import Geometry
from chorus.server.cluster.report import model_hash

from ...tables import LAYER_MATRICES
from ..test_families import executor_of, logits_of

pytestmark = pytest.mark.wide

GEOMETRY = Geometry(hidden=288, ffn=352, layers=2, heads=4, kv_heads=2, vocab=512)
PROMPTS = [[3, 7, 11, 4, 5, 9], [9, 2], list(range(20, 60))]
NAMES = ("int8", "int4")


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return random_model.checkpoint(random_model.RandomModel(GEOMETRY), tmp_path_factory.mktemp("model"))


def twin_of(model: Path, name: str, path: Path, *, lm_head: bool = False) -> Path:
    """A float32 checkpoint of the dequantised weights, computed weight by weight from the definition."""
    shutil.copytree(model, path)
    tensors = load_file(path / "model.safetensors")
    half = {"int8": 128, "int4": 8, "fp8": 0}[name]
    for key, tensor in tensors.items():
        if not (key.endswith("_proj.weight") or (lm_head and key == "lm_head.weight")):
            continue
        weight = tensor.float()
        if name == "fp8":
            scale = weight.abs().amax(1, keepdim=True) / 448
            tensors[key] = (weight / scale).to(torch.float8_e4m3fn).float() * scale
            continue
        inputs = weight.shape[1]
        group = inputs if name == "int8" else {288: 32, 352: 32}[inputs]
        for first in range(0, weight.shape[1], group):
            part = weight[:, first : first + group]
            scale = (part.abs().amax(1, keepdim=True) / (half - 0.5)).bfloat16().float()
            weight[:, first : first + group] = (part * (1 / scale)).round().clamp(-half, half - 1) * scale
        tensors[key] = weight
    save_file(tensors, path / "model.safetensors")
    return path


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("lm_head", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_torch_computes_the_bits_of_the_dequantised_twin(model, tmp_path, name, lm_head, dtype):
    twin = twin_of(model, name, tmp_path / "twin", lm_head=lm_head)
    options = {"dtype": dtype, "cpu_kernels": "torch"}
    quantised = executor_of(model, quantization=name, quantize_lm_head=lm_head, **options)
    found, want = logits_of(quantised, PROMPTS), logits_of(executor_of(twin, **options), PROMPTS)
    assert torch.equal(found, want)
    plain = logits_of(executor_of(model, **options), PROMPTS)
    assert 0.001 < ((found - plain).norm() / plain.norm()).item() < (0.05 if name == "int8" else 0.6)


def test_fp8_has_the_bits_of_its_twin_whole_and_in_shares(model, tmp_path):
    twin = twin_of(model, "fp8", tmp_path / "twin", lm_head=True)
    options = {"dtype": "bfloat16", "cpu_kernels": "torch"}
    executor = executor_of(model, quantization="fp8", quantize_lm_head=True, **options)
    found, want = logits_of(executor, PROMPTS), logits_of(executor_of(twin, **options), PROMPTS)
    assert torch.equal(found, want)
    config = read_model_config(model)
    for rank in range(2):
        layers = []
        for path, quantiser in ((model, RoundToNearest("fp8")), (twin, None)):
            with open_weights(path, config, torch.bfloat16, shard=Shard(rank, 2), quantiser=quantiser) as weights:
                layers.append(list(weights.layers()))
        for one, other in zip(*layers, strict=True):
            assert all(torch.equal(one[each], other[each]) for each in LAYER_MATRICES)


def test_fp8_rounds_to_the_nearest_of_a_row():
    """Rows of zeros stay zeros, and tiny ones have a scale that is above 0: others divide by it."""
    rows = torch.tensor([[448.0, 27.0, 29.0, -0.001], [0.0, 0.0, 0.0, 0.0], [2.0**-133, 0.0, 0.0, 0.0]])
    matrix = RoundToNearest("fp8")(rows)
    assert matrix.scales.flatten().tolist() == [1.0, 2.0**-126, 2.0**-126]
    assert matrix.dequantised().tolist()[:2] == [[448.0, 28.0, 28.0, -(2.0**-9)], [0.0] * 4]
    assert matrix.values.float().isfinite().all()


@pytest.mark.native
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "bound"), [("float32", 2e-5), ("bfloat16", 0.02)])
def test_native_logits_are_the_twins_within_the_bound(model, tmp_path, name, dtype, bound):
    twin = twin_of(model, name, tmp_path / "twin", lm_head=True)
    want = logits_of(executor_of(twin, dtype="float32", cpu_kernels="torch"), PROMPTS)
    executor = executor_of(model, dtype=dtype, cpu_kernels="native", quantization=name, quantize_lm_head=True)
    found = logits_of(executor, PROMPTS)
    assert ((found - want).norm(dim=-1) / want.norm(dim=-1)).max() < bound


@pytest.mark.native
@pytest.mark.parametrize("name", NAMES)
def test_bytes_of_the_weights_are_those_that_are_kept(model, name):
    executor = executor_of(model, cpu_kernels="native", quantization=name, quantize_lm_head=True)
    config = executor.whole
    layers = executor.decoder.layers
    packed = [layer[each] for layer in layers for each in ("qkv", "o", "gate_up", "down")]
    in_layers = sum(it.data.nbytes + it.scales.nbytes for it in packed)
    bits = {"int8": 8, "int4": 4}[name]
    head = config.vocab_size * (config.hidden_size * bits // 8 + 4 * (1 if bits == 8 else 9))
    others = 2 * (config.vocab_size * config.hidden_size + 5 * config.hidden_size)
    assert executor.weight_bytes == in_layers + head + others
    plain = kept_bytes(config, 2)
    assert executor.weight_bytes < plain * (0.7 if name == "int8" else 0.55)
    for shard in (Shard(0, 2), Shard(1, 2)):  # columns of the second may begin within a group, which makes groups finer
        loader = WeightLoader(model, config, torch.bfloat16, shard=shard)
        loader.quantiser = RoundToNearest(name)
        shares = loader.layers(PackedWeights(torch.bfloat16).add)
        in_layers = sum(layer[each].nbytes for layer in shares for each in LAYER_MATRICES)
        others = 2 * (config.vocab_size * config.hidden_size * 3 // 2 + 5 * config.hidden_size)
        assert kept_bytes(config, 2, PACKED, shard, loader.quantiser) == in_layers + others


def test_what_keeps_dequantised_weights_says_so(model, caplog):
    with caplog.at_level(logging.WARNING, "chorus"):
        executor_of(model, cpu_kernels="torch", quantization="int4")
    assert "quantization is int4, but PyTorch's operators multiply dequantised weights" in caplog.text
    assert "the native CPU decoder, and GPUs unless small_gemm is off, keep them quantised" in caplog.text


@pytest.mark.native
def test_the_native_decoder_says_that_it_dequantises_fp8(model, caplog):
    with caplog.at_level(logging.WARNING, "chorus"):
        executor = executor_of(model, cpu_kernels="native", quantization="fp8")
    assert "quantization is fp8, but the native decoder multiplies dequantised weights" in caplog.text
    assert executor.weight_bytes == kept_bytes(executor.whole, 2)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"quantization": "awq"}, "read from its files; leave quantization out to serve awq"),
        ({"quantization": "int3"}, "'int8', 'int4', 'w8a8', 'w4a8' or 'fp8'"),
        ({"quantize_lm_head": True}, "quantize_lm_head needs quantization"),
        ({"fp8_activations": True, "small_gemm": "off"}, "small_gemm is 'off', which dequantises FP8 weights"),
    ],
)
def test_other_forms_are_refused(fields, why):
    with pytest.raises(ValidationError, match=why):
        EngineConfig(model=Path("any"), **fields)


def test_a_quantised_checkpoint_is_not_quantised_again(model, tmp_path):
    quantised = shutil.copytree(model, tmp_path / "quantised")
    config = json.loads((model / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "fp8"}}))
    with pytest.raises(UnsupportedModel, match="quantization is 'int8', but the checkpoint is quantised already"):
        CpuExecutor(EngineConfig(model=quantised, quantization="int8", device="cpu", threads=1))


def test_replicas_with_other_weights_are_other_models(model):
    hashes = {model_hash(model, form=form) for form in ("", "int8", "int4", "int4 with lm_head", "w8a8", "w4a8", "fp8")}
    assert len(hashes) == 7
    assert model_hash(model) == model_hash(model, form="")
    assert read_model_config(model).weight_format is None
