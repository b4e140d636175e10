"""Persimmon, and Fuyu's text: LayerNorm of heads with a bias, ReLU² without a gate, and biases everywhere.

q, k and v are one projection, which has the rows of all three by head.

Tests: tests/core/test_families.py, tests/core/test_text_parts.py
"""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import gpt_2, reading, rotary
from .defaults import Defaults

_FUSED = "self_attn.query_key_value"


def _read(fields: ConfigJson) -> ModelConfig:
    fields = gpt_2.alone(fields)
    heads = reading.heads(fields)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=rotary.rope(fields, heads.head_dim),
        head_norm=HeadNorm.BIASED if fields.boolean("qk_layernorm") else None,
        qkv_bias=True,
        o_bias=True,
    )
    feed_forward = reading.ungated(fields, default=UngatedActivation.RELU_SQUARED, bias=True)
    layers = [DecoderLayer(attention, feed_forward)] * fields.integer("num_hidden_layers")
    return reading.dense(fields, layers, reading.layer_norm(fields, "layer_norm_eps"))


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
            "mlp.up_proj": "mlp.dense_h_to_4h",
            "mlp.down_proj": "mlp.dense_4h_to_h",
        },
        fused={_FUSED: ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")},
        by_unit=(_FUSED,),
    ),
)
