"""RecurrentGemma: Gemma whose layers have gated linear recurrent units, but for every third, with local attention.

Tests: tests/core/layers/test_hybrid_paths.py, tests/core/paths
"""

from __future__ import annotations

import struct
from dataclasses import replace

from ...compose.decoder_layer import DecoderLayer
from ...config_json import ConfigJson
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.rope_config import RopeConfig
from ...specs.tensor_names import TensorNames, gated_names
from .. import reading, rotary
from ..defaults import Defaults
from .rg_lru import RgLruSpec

_ATTENTION, _RECURRENT = "attention", "recurrent"

#: Positions that the models were trained for, where `config.json` says nothing, as that of transformers' class does.
_TRAINED = 8192


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.text("hidden_activation") != "gelu_pytorch_tanh":
        raise fields.refuse("hidden_activation", "not supported; supported: gelu_pytorch_tanh")
    hidden = fields.integer("hidden_size")
    window = fields.integer(reading.one_of(fields, "attention_window_size", "sliding_window"))
    bias = fields.boolean("attention_bias")
    attention = rotary.attention(fields, adjust=_checked, window=window, qkv_bias=bias, o_bias=True)
    width = fields.optional("lru_width") or hidden
    if width % (heads := attention.num_heads):
        raise fields.refuse("lru_width", f"it must be a multiple of num_attention_heads, {heads}")
    conv = fields.integer("conv1d_width", least=2)
    mixers = {_ATTENTION: attention, _RECURRENT: RgLruSpec(heads, width // heads, conv)}
    gated = reading.gated(fields, "hidden_activation", bias=True)
    if gated.size % 2:
        raise fields.refuse("intermediate_size", "it is that of gate and up together, and must be even")
    positions = fields.integer("max_position_embeddings", _TRAINED)
    return reading.dense(
        fields.with_values({"max_position_embeddings": positions}),
        [DecoderLayer(mixers[kind], replace(gated, size=gated.size // 2)) for kind in _types(fields)],
        reading.rms_norm(fields, one_plus=True),
        embedding_multiplier=_bfloat16(hidden**0.5),
        logits_softcap=fields.number("logits_soft_cap"),
    )


def _checked(fields: ConfigJson, rope: RopeConfig) -> RopeConfig:
    if rope.type != "default":
        raise fields.refuse("rope_parameters", f"transformers computes no {rope.type} rope of this family")
    return rope


def _types(fields: ConfigJson) -> list[str]:
    """Of each layer: `block_types` over and over."""
    count = fields.integer("num_hidden_layers")
    types = fields.texts("block_types") if fields.has("block_types") else [_RECURRENT, _RECURRENT, _ATTENTION]
    if not types:
        raise fields.refuse("block_types", "it has no type; leave the field out for its default")
    if unknown := sorted(set(types) - {_ATTENTION, _RECURRENT}):
        raise fields.refuse("block_types", f"{unknown[0]} is not supported; supported: {_ATTENTION}, {_RECURRENT}")
    return [types[index % len(types)] for index in range(count)]


def _bfloat16(value: float) -> float:
    """The value in bfloat16, as transformers keeps the embeddings' factor whatever the model's dtype is."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000
    return struct.unpack("<f", struct.pack("<I", rounded))[0]


_MIXER = "temporal_block"
RECURRENT_GEMMA = Family(
    "RecurrentGemma",
    ("RecurrentGemmaForCausalLM",),
    _read,
    Defaults("RecurrentGemmaConfig"),
    TensorNames(
        norm="final_norm",
        names={
            "attention_norm": "temporal_pre_norm",
            "mlp_norm": "channel_pre_norm",
            **{f"self_attn.{each}_proj": f"{_MIXER}.{each}_proj" for each in "qkvo"},
            **gated_names("mlp", "mlp_block"),
            **{f"temporal.linear_{each}": f"{_MIXER}.linear_{each}" for each in ("y", "x", "out")},
            **{f"temporal.{each}": f"{_MIXER}.{each}" for each in ("conv_1d", "rg_lru")},
        },
    ),
    nulls=("lru_width", "num_key_value_heads"),
)
