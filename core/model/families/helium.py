"""Helium: Llama that rotates neighbouring pairs, with norms that are rounded once."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields, interleaved=True, qkv_bias=fields.boolean("attention_bias"))
    feed_forward = reading.gated(fields, bias=fields.boolean("mlp_bias"))
    return reading.decoder(fields, attention, feed_forward, reading.rms_norm(fields, wide=True))


HELIUM = Family(
    "Helium",
    ("HeliumForCausalLM",),
    _read,
    Defaults("HeliumConfig"),
)
