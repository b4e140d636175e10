"""Llama 2 and 3, the many models that are saved under their architecture, Emu 3, and CWM, which has windows."""

from __future__ import annotations

from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family, text_shape
from . import reading, rotary


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
    {"max_position_embeddings": 2048},
    nulls=("head_dim", "num_key_value_heads"),
    shape=text_shape(32000, 4096, 11008, 32, 32),
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
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "sliding_window": 8192,
        "rope_theta": 1000000.0,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 1000000.0, "factor": 16.0, "high_freq_factor": 4.0,
            "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
        },
    },
)  # fmt: skip
EMU_3_TEXT = replace(
    LLAMA,
    title="Emu 3 (text)",
    architectures=("Emu3ForCausalLM",),
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 9216,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        "bos_token_id": 151849,
        "eos_token_id": 151850,
    },
    shape=text_shape(184622, 4096, 14336, 32, 32),
)
