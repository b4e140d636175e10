"""Llama 2 and 3, the many models that are saved under their architecture, Emu 3, and CWM, which has windows."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from . import reading, rotary
from .defaults import TOKENS, Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    feed_forward = reading.gated(fields, bias=fields.boolean("mlp_bias"))
    return reading.decoder(fields, rotary.attention(fields), feed_forward)


def _read_iquest(fields: ConfigJson) -> ModelConfig:
    for name in ("clip_qkv", "use_sliding_window"):
        if fields.raw.get(name):
            raise fields.refuse(name, "transformers does not compute it, either; only null and false are supported")
    return _read(fields)


def _read_windows(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields, bias=False)
    types = [reading.SLIDING if at % 4 else reading.FULL for at in range(fields.integer("num_hidden_layers"))]
    mixers = rotary.of_types(fields, attention, reading.layer_types(fields, types))
    feed_forward = reading.gated(fields, bias=fields.boolean("mlp_bias"))
    return reading.decoder(fields, mixers, feed_forward)


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
