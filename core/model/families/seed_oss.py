"""Seed-OSS: Llama with biases that have fields of their own."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(
        fields, qkv_bias=fields.boolean("attention_bias"), o_bias=fields.boolean("attention_out_bias")
    )
    return reading.decoder(fields, attention, reading.gated(fields, bias=fields.boolean("mlp_bias")))


SEED_OSS = Family(
    "Seed-OSS",
    ("SeedOssForCausalLM",),
    _read,
    Defaults("SeedOssConfig"),
    nulls=("head_dim", "num_key_value_heads"),
)
