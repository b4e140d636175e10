"""DBRX, whose experts are rows of one matrix: reading, shares of ranks, adapters and refusals."""

from __future__ import annotations

import json
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.model.read_config import read_model_config
from chorus.core.model.specs.config import UnsupportedModel
from chorus.core.model.weights.shard import Shard
from chorus.core.model.weights.weight_loader import WeightLoader
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.format import inspect_adapter

from ...tiny_families import make_all_linear, save_family

pytestmark = pytest.mark.wide


@pytest.fixture
def model(tmp_path):
    save_family("dbrx", tmp_path)
    return tmp_path


def changed(path: Any, part: str, **fields: Any) -> Any:
    raw = json.loads((path / "config.json").read_text())
    raw[part] |= fields
    (path / "config.json").write_text(json.dumps(raw))
    return path


@pytest.mark.parametrize("shard", [Shard(), Shard(1, 2)], ids=["whole", "a rank"])
def test_matrices_of_experts_are_rows_of_flat_ones(model, shard):
    config, tensors = read_model_config(model), load_file(model / "model.safetensors")
    experts = next(WeightLoader(model, config, torch.float32, shard=shard).layers())["experts"]
    names = (f"transformer.blocks.0.ffn.experts.mlp.{name}" for name in ("w1", "v1", "w2"))
    w1, v1, w2 = (tensors[name].view(8, 40, 64) for name in names)
    own = slice(40 // shard.size * shard.rank, 40 // shard.size * (shard.rank + 1))
    for number in range(8):
        assert torch.equal(experts.gate_up[number], torch.cat((w1[number][own], v1[number][own])))
        assert torch.equal(experts.down[number], w2[number][own].T)


def test_a_flat_matrix_of_another_shape_is_refused(model):
    tensors = load_file(model / "model.safetensors")
    name = "transformer.blocks.1.ffn.experts.mlp.w2"
    tensors[name] = tensors[name].T.contiguous()
    save_file(tensors, model / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=rf"{name}.*\[64, 320\]|{name}.*\(64, 320\)"):
        WeightLoader(model, read_model_config(model), torch.float32)


@pytest.mark.parametrize(
    ("part", "fields", "why"),
    [
        ("ffn_config", {"moe_normalize_expert_weights": 2.0}, "only norms of the order 1"),
        ("ffn_config", {"ffn_act_fn": {"name": "mish"}}, "mish|not supported"),
        ("ffn_config", {"moe_top_k": 9}, "can't be more than that"),
    ],
)
def test_what_is_refused(model, part, fields, why):
    with pytest.raises(UnsupportedModel, match=why):
        read_model_config(changed(model, part, **fields))


def test_adapters_of_flat_matrices_are_refused(model, tmp_path):
    """PEFT makes one A and one B of all experts' rows together."""
    it = make_all_linear("dbrx")
    shutil.copytree(it.adapters["all"], tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    path = "base_model.model.transformer.blocks.0.ffn.experts.mlp"
    more = {f"{path}.lora_A.weight": torch.ones(4, 64), f"{path}.lora_B.weight": torch.ones(320, 4)}
    save_file(load_file(file) | more, file)
    with pytest.raises(AdapterFormatError, match=r"ffn\.experts\.mlp"):
        inspect_adapter(tmp_path / "adapter", read_model_config(model).module_paths)
