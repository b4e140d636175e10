"""Bamba: layers of Mamba 2, with a few layers of attention, whose heads rotate by half.

Tests: tests/core/layers/test_hybrids.py
"""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.tensor_names import TensorNames
from . import reading, rotary
from .defaults import Defaults
from .mamba import mamba_2


def _read(fields: ConfigJson) -> ModelConfig:
    """Whatever `partial_rotary_factor` is, transformers rotates half of a head, unless `rope_parameters` has it."""
    attention = rotary.attention(fields.with_values({"partial_rotary_factor": 0.5}))
    feed_forward = reading.gated(fields, bias=fields.boolean("mlp_bias"))
    mamba, attends = mamba_2(fields), set(fields.indices("attn_layer_indices"))
    layers = [
        DecoderLayer(attention if index in attends else mamba, feed_forward)
        for index in range(fields.integer("num_hidden_layers"))
    ]
    return reading.dense(fields, layers, reading.rms_norm(fields))


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
            "mlp.gate_proj": "feed_forward.gate_proj",
            "mlp.up_proj": "feed_forward.up_proj",
            "mlp.down_proj": "feed_forward.down_proj",
        },
    ),
    nulls=("num_key_value_heads",),
)
