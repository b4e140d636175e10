"""Persimmon, and Fuyu's text: LayerNorm of heads with a bias, ReLU² without a gate, and biases everywhere.

q, k and v are one projection, which has the rows of all three by head.

Tests: tests/core/test_families.py, tests/core/test_text_parts.py
"""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.tensor_names import LLAMA_NORMS, QKV, TensorNames
from . import gpt_2, reading, rotary
from .bloom import DENSE_NAMES
from .defaults import Defaults

_FUSED = "self_attn.query_key_value"


def _read(fields: ConfigJson) -> ModelConfig:
    fields = gpt_2.alone(fields)
    head_norm = HeadNorm.BIASED if fields.boolean("qk_layernorm") else None
    attention = rotary.attention(fields, bias=True, head_norm=head_norm)
    feed_forward = reading.ungated(fields, default=UngatedActivation.RELU_SQUARED, bias=True)
    return reading.decoder(fields, attention, feed_forward, reading.layer_norm(fields, "layer_norm_eps"))


PERSIMMON = Family(
    "Persimmon",
    ("PersimmonForCausalLM",),
    _read,
    Defaults("PersimmonConfig"),
    TensorNames(
        norm="final_layernorm",
        names={
            **LLAMA_NORMS,
            "self_attn.o_proj": "self_attn.dense",
            "self_attn.q_norm": "self_attn.q_layernorm",
            "self_attn.k_norm": "self_attn.k_layernorm",
            **DENSE_NAMES,
        },
        fused={_FUSED: QKV},
        by_unit=(_FUSED,),
    ),
)
