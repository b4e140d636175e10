"""SmolLM3: Llama, but every fourth layer does not rotate (NoPE)."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    count = fields.integer("num_hidden_layers")
    interval = fields.integer("no_rope_layer_interval")
    rotates = fields.numbers("no_rope_layers")
    if fields.is_missing("no_rope_layers"):
        rotates = [(index + 1) % interval for index in range(count)]
    if len(rotates) != count:
        raise fields.refuse("no_rope_layers", f"{len(rotates)} values for num_hidden_layers, {count}")
    window = fields.optional("sliding_window") if fields.boolean("use_sliding_window") else None
    default = [reading.FULL if window is None or rotated else reading.SLIDING for rotated in rotates]
    windows, attention = reading.windows_of(fields, reading.layer_types(fields, default)), rotary.attention(fields)
    mixers = [
        replace(attention, rope=attention.rope if rotated else None, window=each)
        for rotated, each in zip(rotates, windows, strict=True)
    ]
    return reading.decoder(fields, mixers, reading.gated(fields, bias=fields.boolean("mlp_bias")))


SMOLLM3 = Family(
    "SmolLM3",
    ("SmolLM3ForCausalLM",),
    _read,
    Defaults("SmolLM3Config"),
    nulls=("num_key_value_heads",),
)
