"""SmolLM3: Llama, but every fourth layer does not rotate (NoPE)."""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads, count = reading.heads(fields), fields.integer("num_hidden_layers")
    interval = fields.integer("no_rope_layer_interval")
    rotates = fields.numbers("no_rope_layers")
    if fields.is_missing("no_rope_layers"):
        rotates = [(index + 1) % interval for index in range(count)]
    if len(rotates) != count:
        raise fields.refuse("no_rope_layers", f"{len(rotates)} values for num_hidden_layers, {count}")
    window = fields.optional("sliding_window") if fields.boolean("use_sliding_window") else None
    default = [reading.FULL if window is None or rotated else reading.SLIDING for rotated in rotates]
    types = reading.layer_types(fields, 1) if fields.texts("layer_types") else default
    window = reading.checked_window(fields, types)
    bias, rope = fields.boolean("attention_bias"), rotary.rope(fields, heads.head_dim)
    layers = [
        DecoderLayer(
            AttentionSpec(
                *heads,
                scale=heads.head_dim**-0.5,
                rope=rope if rotated else None,
                window=window if seen == reading.SLIDING else None,
                qkv_bias=bias,
                o_bias=bias,
            ),
            reading.gated(fields, bias=fields.boolean("mlp_bias")),
        )
        for rotated, seen in zip(rotates, types, strict=True)
    ]
    return reading.dense(fields, layers, reading.rms_norm(fields))


SMOLLM3 = Family(
    "SmolLM3",
    ("SmolLM3ForCausalLM",),
    _read,
    Defaults("SmolLM3Config"),
    nulls=("num_key_value_heads",),
)
