"""InternLM 3: Llama with names of its own for biases, and heads of 128."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import reading, rotary


def _read(fields: ConfigJson) -> ModelConfig:
    of_qkv, of_rest = (_either(fields, *names) for names in (("qkv_bias", "attention_bias"), ("bias", "mlp_bias")))
    if of_qkv != of_rest:
        raise fields.refuse("qkv_bias", f"bias is {of_rest}; transformers computes only models with both or neither")
    return reading.decoder(fields, rotary.attention(fields, bias=of_qkv), reading.gated(fields, bias=of_rest))


def _either(fields: ConfigJson, name: str, other: str) -> bool:
    return fields.boolean(name if name in fields.raw else other)


INTERNLM_3 = Family(
    "InternLM 3",
    ("InternLM3ForCausalLM",),
    _read,
    {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5},
    nulls=("head_dim", "num_key_value_heads"),
)
