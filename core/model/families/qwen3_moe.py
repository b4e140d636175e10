"""Qwen3 with a mixture of experts, in all layers or in some."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, HeadNorm, LayerSpec, Routing
from . import reading


def _read(fields: ConfigJson) -> ModelConfig:
    heads, bias, count = reading.heads(fields), fields.boolean("attention_bias"), fields.integer("num_hidden_layers")
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=reading.rope(fields, heads.head_dim),
        head_norm=HeadNorm.EACH,
        qkv_bias=bias,
        o_bias=bias,
        window=fields.optional("sliding_window") if fields.boolean("use_sliding_window") else None,
    )
    experts = reading.experts(fields, Routing(1, renormalised=fields.boolean("norm_topk_prob")))
    sparse = LayerSpec(attention, experts)
    step, dense = fields.integer("decoder_sparse_step"), set(fields.indices("mlp_only_layers"))
    has_experts = [index not in dense and (index + 1) % step == 0 for index in range(count)]
    plain = sparse if all(has_experts) else LayerSpec(attention, reading.gated(fields))
    return reading.dense(fields, [sparse if it else plain for it in has_experts], reading.rms_norm(fields))


QWEN3_MOE = Family(
    "Qwen3-MoE",
    ("Qwen3MoeForCausalLM",),
    _read,
    {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
    },
    notes=reading.EXPERTS_NOTE,
)
