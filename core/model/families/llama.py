"""Llama 2 and 3, and the many models that are saved under their architecture."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, LayerSpec
from . import reading


def _read(fields: ConfigJson) -> ModelConfig:
    heads = reading.heads(fields)
    bias = fields.boolean("attention_bias")
    attention = AttentionSpec(
        *heads, scale=heads.head_dim**-0.5, rope=reading.rope(fields, heads.head_dim), qkv_bias=bias, o_bias=bias
    )
    layer = LayerSpec(attention, reading.gated(fields, bias=fields.boolean("mlp_bias")))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields))


LLAMA = Family("Llama 2 and 3", ("LlamaForCausalLM",), _read, {"max_position_embeddings": 2048})
