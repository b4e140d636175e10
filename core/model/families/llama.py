"""Llama 2 and 3, the many models that are saved under their architecture, Emu 3, and CWM, which has windows."""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import reading, rotary
from .defaults import TOKENS, Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields)
    layer = DecoderLayer(attention, reading.gated(fields, bias=fields.boolean("mlp_bias")))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields))


def _read_iquest(fields: ConfigJson) -> ModelConfig:
    for name in ("clip_qkv", "use_sliding_window"):
        if fields.raw.get(name):
            raise fields.refuse(name, "transformers does not compute it, either; only null and false are supported")
    return _read(fields)


def _read_windows(fields: ConfigJson) -> ModelConfig:
    heads, count = reading.heads(fields), fields.integer("num_hidden_layers")
    attention = AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=rotary.rope(fields, heads.head_dim))
    feed_forward = reading.gated(fields, bias=fields.boolean("mlp_bias"))
    types = [reading.SLIDING if index % 4 else reading.FULL for index in range(count)]
    layers = [DecoderLayer(replace(attention, window=each), feed_forward) for each in reading.windows(fields, types)]
    return reading.dense(fields, layers, reading.rms_norm(fields))


LLAMA = Family(
    "Llama 2 and 3",
    ("LlamaForCausalLM",),
    _read,
    Defaults("LlamaConfig"),
    nulls=("head_dim", "num_key_value_heads"),
)
IQUEST_CODER = Family(
    "IQuest-Coder",
    ("IQuestCoderForCausalLM",),
    _read_iquest,
    {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5},
    nulls=("head_dim", "num_key_value_heads"),
)
CWM = Family(
    "Code World Model (CWM)",
    ("CwmForCausalLM",),
    _read_windows,
    Defaults("CwmConfig"),
)  # fmt: skip
EMU_3_TEXT = replace(
    LLAMA,
    title="Emu 3 (text)",
    architectures=("Emu3ForCausalLM",),
    defaults=Defaults("Emu3TextConfig", takes=TOKENS),
)
