"""Llama with a dynamic tanh in place of each norm: how its `config.json` is read."""

from __future__ import annotations

from chorus.core.model.config_json import ConfigJson
from chorus.core.model.families import reading, rotary
from chorus.core.model.specs.config import ModelConfig
from chorus.core.model.specs.family import Family

from .layer import TanhLayer


def _read(fields: ConfigJson) -> ModelConfig:
    part, rank = reading.gated(fields, bias=fields.boolean("mlp_bias")), fields.integer("gate_rank", least=0)
    layer = TanhLayer(rotary.attention(fields), part, gate_rank=rank)
    layers = [layer] * fields.integer("num_hidden_layers")
    return reading.dense(fields, layers, reading.rms_norm(fields), has_last_norm=False)


TANH_LLAMA = Family(
    "Llama with a dynamic tanh",
    ("TanhLlamaForCausalLM",),
    _read,
    {"max_position_embeddings": 2048, "gate_rank": 0},
    notes="on CPUs by PyTorch's operators",
)
