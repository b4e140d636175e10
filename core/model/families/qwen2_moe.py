"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a shared one whose output has a gate."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from . import qwen, reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    count, whole = fields.integer("num_hidden_layers"), fields.integer("max_window_layers", least=0)
    window = fields.optional("sliding_window") if fields.boolean("use_sliding_window") else None
    types = [reading.FULL if index % 2 or index >= whole else reading.SLIDING for index in range(count)]
    attention = rotary.attention(fields, qkv_bias=fields.boolean("qkv_bias"))
    mixers = [replace(attention, window=each) for each in qwen.windows_of(fields, window, types)]
    experts = reading.experts(
        fields,
        Routing(1, renormalised=fields.boolean("norm_topk_prob")),
        shared=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    return reading.decoder(fields, mixers, experts, has_experts=reading.sparse_layers(fields))


QWEN2_MOE = Family(
    "Qwen1.5-MoE and Qwen2-MoE",
    ("Qwen2MoeForCausalLM",),
    _read,
    Defaults("Qwen2MoeConfig", takes=("intermediate_size",)),
    nulls=("num_key_value_heads",),
)
