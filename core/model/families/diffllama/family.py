"""DiffLlama: what attention gives is of differences between heads, by factors that each layer learns.

Tests: tests/core/layers/test_differences.py, tests/core/paths
"""

from __future__ import annotations

import math
from dataclasses import replace

from ...config_json import ConfigJson
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.tensor_names import LLAMA_TENSORS
from .. import reading, rotary
from ..defaults import TOKENS, Defaults
from .layer import DiffLlamaLayer
from .ops import DifferenceSpec


def _read(fields: ConfigJson) -> ModelConfig:
    own = rotary.attention(fields)
    if own.num_kv_heads % 2:
        raise fields.refuse("num_key_value_heads", "values are those of two heads; an even number is needed")
    if fields.raw.get("attention_dropout"):
        raise fields.refuse("attention_dropout", "transformers refuses it for this family; only 0 is supported")
    key = own.head_dim
    attention = replace(own, head_dim=2 * key, value_dim=key)
    feed_forward = reading.gated(fields)
    layers = [
        DiffLlamaLayer(attention, feed_forward, difference=DifferenceSpec(_first(index), key))
        for index in range(fields.integer("num_hidden_layers"))
    ]
    return reading.dense(fields, layers, reading.rms_norm(fields))


def _first(layer: int) -> float:
    """The factor of a layer before training."""
    return 0.8 - 0.6 * math.exp(-0.3 * layer)


DIFF_LLAMA = Family(
    "DiffLlama",
    ("DiffLlamaForCausalLM",),
    _read,
    Defaults("DiffLlamaConfig", takes=TOKENS),
    LLAMA_TENSORS,
    notes="a token takes twice the memory of Llama's",
    nulls=("num_key_value_heads", "head_dim"),
)
