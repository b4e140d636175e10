"""Apertus: Llama with norms of heads, and xIELU in a feed-forward part without a gate."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.layers import LayerSpec
from ..specs.tensor_names import TensorNames
from . import reading, rotary


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields, head_norm=HeadNorm.EACH)
    layer = LayerSpec(attention, reading.ungated(fields, default=UngatedActivation.XIELU))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields))


APERTUS = Family(
    "Apertus",
    ("ApertusForCausalLM",),
    _read,
    {
        "max_position_embeddings": 65536,
        "rms_norm_eps": 1e-5,
        "rope_theta": 12000000.0,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 12000000.0, "factor": 8.0, "original_max_position_embeddings": 8192,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        },
    },
    TensorNames(names={"attention_norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}),
    nulls=("num_key_value_heads",),
)  # fmt: skip
