"""Helium: Llama that rotates neighbouring pairs, with norms that are rounded once."""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads = reading.heads(fields)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=rotary.rope(fields, heads.head_dim, interleaved=True),
        qkv_bias=fields.boolean("attention_bias"),
    )
    layer = DecoderLayer(attention, reading.gated(fields, bias=fields.boolean("mlp_bias")))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields, wide=True))


HELIUM = Family(
    "Helium",
    ("HeliumForCausalLM",),
    _read,
    Defaults("HeliumConfig"),
)
