"""BitNet: a norm of what attention's output projection reads, and one of what the feed-forward part's does.

Tests: tests/core/layers/test_inner_norms.py, tests/core/paths
"""

from __future__ import annotations

from ...config_json import ConfigJson
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.tensor_names import LLAMA_TENSORS
from .. import reading, rotary
from ..defaults import TOKENS, Defaults
from .layer import BitNetLayer


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields)
    if attention.q_size != fields.integer("hidden_size"):
        why = f"the norm of attention's output is as wide as hidden_size; heads have {attention.q_size} elements"
        raise fields.refuse("head_dim", why)
    return reading.decoder(fields, attention, reading.gated(fields), kind=BitNetLayer)


BITNET = Family(
    "BitNet",
    ("BitNetForCausalLM",),
    _read,
    Defaults("BitNetConfig", takes=TOKENS),
    LLAMA_TENSORS,
    notes="of weights that are not ternary; `quant_method: bitnet` is refused",
    nulls=("num_key_value_heads",),
)
