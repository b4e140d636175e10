"""Bamba: layers of Mamba 2, with a few layers of attention, whose heads rotate by half.

Tests: tests/core/layers/test_hybrids.py
"""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.tensor_names import TensorNames, gated_names
from . import reading, rotary
from .defaults import Defaults
from .mamba import mamba_2


def _read(fields: ConfigJson) -> ModelConfig:
    """Whatever `partial_rotary_factor` is, transformers rotates half of a head, unless `rope_parameters` has it."""
    attention = rotary.attention(fields.with_values({"partial_rotary_factor": 0.5}))
    feed_forward = reading.gated(fields, bias=fields.boolean("mlp_bias"))
    mamba, attends = mamba_2(fields), set(fields.indices("attn_layer_indices"))
    mixers = [attention if at in attends else mamba for at in range(fields.integer("num_hidden_layers"))]
    return reading.decoder(fields, mixers, feed_forward)


BAMBA = Family(
    "Bamba",
    ("BambaForCausalLM",),
    _read,
    Defaults("BambaConfig"),
    TensorNames(
        norm="final_layernorm",
        names={
            "attention_norm": "input_layernorm",
            "mlp_norm": "pre_ff_layernorm",
            **gated_names("mlp", "feed_forward"),
        },
    ),
    nulls=("num_key_value_heads",),
)
