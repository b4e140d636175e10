"""Mellum 2: Qwen3-MoE with a rope for each kind of layer."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.tensor_names import TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention, types = rotary.attention(fields, rope=None, head_norm=HeadNorm.EACH), reading.layer_types(fields)
    ropes = rotary.whole_ropes(fields, attention.head_dim, types, _ROPES)
    mixers = rotary.of_types(fields, attention, types, ropes)
    experts = reading.experts(fields, Routing(1, renormalised=fields.boolean("norm_topk_prob")))
    has_experts, tensors = reading.mlp_layer_types(fields, 0), TensorNames(left_out=("mtp.",))
    return reading.decoder(fields, mixers, experts, has_experts=has_experts, tensors=tensors)


_ROPES = {
    reading.FULL: {"rope_type": "default", "rope_theta": 500000.0},
    reading.SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
}
MELLUM = Family(
    "Mellum 2",
    ("MellumForCausalLM",),
    _read,
    Defaults("MellumConfig", takes=("intermediate_size",)),
    notes="draft layers (`mtp`) are left out",
)
