"""Laguna: gates of attention by softplus, a rope for each type of layers, and experts chosen by sigmoids with a learned
correction.

Tests: tests/core/test_experts.py
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm, OutputGate
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.tensor_names import CORRECTION, LLAMA_NORMS, SHARED_EXPERTS, TensorNames
from . import reading, rotary
from .defaults import Defaults

_GATES = {True: OutputGate.PER_HEAD, "per-head": OutputGate.PER_HEAD, "per-element": OutputGate.PER_ELEMENT}


def _read(fields: ConfigJson) -> ModelConfig:
    heads, count = reading.heads(fields), fields.integer("num_hidden_layers")
    numbers = fields.indices("num_attention_heads_per_layer") or (heads.num_heads,) * count
    if len(numbers) != count or any(not each or each % heads.num_kv_heads for each in numbers):
        why = f"multiples of num_key_value_heads, {heads.num_kv_heads}, are needed, one for each layer"
        raise fields.refuse("num_attention_heads_per_layer", why)
    if fields.raw.get("moe_router_logit_softcapping"):
        raise fields.refuse("moe_router_logit_softcapping", "soft caps of a router are not supported; only 0 is")
    if (gating := fields.raw.get("gating", True)) not in _GATES or (gating == 1 and gating is not True):
        raise fields.refuse("gating", "not supported; supported: true, per-head, per-element")
    types = reading.layer_types(fields, [reading.FULL] * count)
    own = fields.with_defaults({"partial_rotary_factor": 1.0})
    ropes = rotary.whole_ropes(own, heads.head_dim, types, _ROPES)
    attention = rotary.attention(
        fields, rope=None, head_norm=HeadNorm.EACH, output_gate=_GATES[gating], softplus_gates=True
    )
    mixers = [
        replace(mixer, num_heads=number, form="" if number == heads.num_heads else f"{number} heads")
        for mixer, number in zip(rotary.of_types(fields, attention, types, ropes), numbers, strict=True)
    ]
    routing = reading.sigmoid_routing(fields, "moe_routed_scaling_factor")
    experts = reading.experts(fields, routing, shared=fields.integer("shared_expert_intermediate_size"))
    return reading.decoder(fields, mixers, experts, has_experts=reading.mlp_layer_types(fields, 1))


#: Where `rope_parameters` is missing.
_ROPES = {
    reading.FULL: {"rope_type": "default", "rope_theta": 500000.0, "partial_rotary_factor": 0.5},
    reading.SLIDING: {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
}

LAGUNA = Family(
    "Laguna",
    ("LagunaForCausalLM",),
    _read,
    Defaults("LagunaConfig", takes=("intermediate_size",)),
    TensorNames(names={**LLAMA_NORMS, **SHARED_EXPERTS, CORRECTION: "mlp.experts.e_score_correction_bias"}),
    nulls=("num_attention_heads_per_layer",),
)
