"""The text part of Cosmos 3 Edge: grouped-query attention, and ReLU² without a gate.

Tests: tests/core/test_text_parts.py
"""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import UngatedActivation
from ..specs.tensor_names import LLAMA_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields)
    if attention.rope is None or attention.rope.type != "default":
        raise rotary.rope_fields(fields).refuse("rope_type", "transformers takes default alone for this family")
    rotary.check_sections(fields, attention.rope, _SECTIONS)
    bias = fields.boolean("mlp_bias")
    return reading.decoder(
        fields, attention, reading.ungated(fields, default=UngatedActivation.RELU_SQUARED, bias=bias)
    )


_SECTIONS = (24, 20, 20)

#: Names of attention's projections in checkpoints that diffusers reads, too.
TO_PROJECTIONS = {
    f"self_attn.{ours}": f"self_attn.{theirs}"
    for ours, theirs in {"q_proj": "to_q", "k_proj": "to_k", "v_proj": "to_v", "o_proj": "to_out"}.items()
}

EDGE_TEXT = Family(
    "Cosmos 3 Edge (text)",
    (),
    _read,
    Defaults("Cosmos3EdgeTextConfig"),
    TensorNames(
        names={**LLAMA_NORMS, "mlp.up_proj": "mlp.fc1", "mlp.down_proj": "mlp.fc2"},
        older=TO_PROJECTIONS,
    ),
    nulls=("head_dim", "num_key_value_heads"),
)
