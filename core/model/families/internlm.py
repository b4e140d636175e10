"""InternLM 3: Llama with names of its own for biases, and heads of 128."""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import reading, rotary


def _read(fields: ConfigJson) -> ModelConfig:
    heads = reading.heads(fields)
    of_qkv, of_rest = (_either(fields, *names) for names in (("qkv_bias", "attention_bias"), ("bias", "mlp_bias")))
    if of_qkv != of_rest:
        raise fields.refuse("qkv_bias", f"bias is {of_rest}; transformers computes only models with both or neither")
    rope = rotary.rope(fields, heads.head_dim)
    attention = AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=rope, qkv_bias=of_qkv, o_bias=of_qkv)
    layer = DecoderLayer(attention, reading.gated(fields, bias=of_rest))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields))


def _either(fields: ConfigJson, name: str, other: str) -> bool:
    return fields.boolean(name if name in fields.raw else other)


INTERNLM_3 = Family(
    "InternLM 3",
    ("InternLM3ForCausalLM",),
    _read,
    {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    nulls=("head_dim", "num_key_value_heads"),
)
