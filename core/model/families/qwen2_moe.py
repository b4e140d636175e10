"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and a shared one whose output has a gate."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads, bias, count = reading.heads(fields), fields.boolean("qkv_bias"), fields.integer("num_hidden_layers")
    window = fields.optional("sliding_window") if fields.boolean("use_sliding_window") else None
    whole, rope = fields.integer("max_window_layers", least=0), rotary.rope(fields, heads.head_dim)
    types = fields.texts("layer_types") and reading.layer_types(fields, 1)
    if window is None and reading.SLIDING in types:
        raise fields.refuse("layer_types", f"{reading.SLIDING} needs use_sliding_window true, and a sliding_window")
    types = types or [reading.FULL if index % 2 or index >= whole else reading.SLIDING for index in range(count)]
    attentions = [
        AttentionSpec(
            *heads,
            scale=heads.head_dim**-0.5,
            rope=rope,
            qkv_bias=bias,
            window=window if seen == reading.SLIDING else None,
        )
        for seen in types
    ]
    experts = reading.experts(
        fields,
        Routing(1, renormalised=fields.boolean("norm_topk_prob")),
        shared_size=fields.integer("shared_expert_intermediate_size"),
        shared_gate=True,
    )
    step, dense = fields.integer("decoder_sparse_step"), set(fields.indices("mlp_only_layers"))
    has_experts = [index not in dense and (index + 1) % step == 0 for index in range(count)]
    layers = reading.layers_with_experts(fields, attentions, experts, has_experts)
    return reading.dense(fields, layers, reading.rms_norm(fields))


QWEN2_MOE = Family(
    "Qwen1.5-MoE and Qwen2-MoE",
    ("Qwen2MoeForCausalLM",),
    _read,
    Defaults("Qwen2MoeConfig", takes=("intermediate_size",)),
    nulls=("num_key_value_heads",),
)
