"""AFMoE (Trinity): gates of attention's output by a projection of their own, norms around each part, and experts chosen
by sigmoids with a learned correction. Layers without a window have no rope.

Tests: tests/core/test_experts.py
"""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm, OutputGate
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import Norms
from ..specs.tensor_names import CORRECTION, SHARED_EXPERTS, TensorNames
from . import reading, rotary
from .defaults import Defaults

#: Fields of the first checkpoints, each with the only value that transformers computes.
_FIXED = {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1, "num_expert_groups": 1}


def _read(fields: ConfigJson) -> ModelConfig:
    for name, value in _FIXED.items():
        if fields.raw.get(name, value) not in (value, None):
            raise fields.refuse(name, f"transformers leaves it out; only {value!r} is supported")
    if fields.boolean("attention_bias"):
        raise fields.refuse("attention_bias", "biases of attention are not supported for this family")
    routing = reading.sigmoid_routing(fields, "route_scale", 1e-20)
    experts = reading.experts(fields, routing, shared="num_shared_experts")
    attention = rotary.attention(fields, head_norm=HeadNorm.EACH, output_gate=OutputGate.PER_ELEMENT)
    types = reading.layer_types(fields, fields.integer("global_attn_every_n_layers"))
    mixers = rotary.of_types(fields, attention, types, {reading.FULL: None, reading.SLIDING: attention.rope})
    first = reading.number_of(fields, "num_dense_layers")
    has_experts = [index >= first for index in range(len(types))]
    norm, norms = reading.rms_norm(fields, wide=True), Norms.AROUND
    scale = fields.integer("hidden_size") ** 0.5 if fields.boolean("mup_enabled") else 1.0
    return reading.decoder(
        fields, mixers, experts, norm, has_experts=has_experts, norms=norms, embedding_multiplier=scale
    )


AFMOE = Family(
    "AFMoE (Trinity)",
    ("AfmoeForCausalLM",),
    _read,
    Defaults("AfmoeConfig", takes=("intermediate_size",)),
    TensorNames(
        names={
            **SHARED_EXPERTS,
            "attention_norm": "input_layernorm",
            "attention_out_norm": "post_attention_layernorm",
            "mlp_norm": "pre_mlp_layernorm",
            "mlp_out_norm": "post_mlp_layernorm",
            "self_attn.g_proj": "self_attn.gate_proj",
            "mlp.gate": "mlp.router.gate",
            CORRECTION: "mlp.expert_bias",
        }
    ),
    notes="`route_norm: false` is refused, since transformers normalises in any case",
    nulls=("global_attn_every_n_layers", "head_dim", "mup_enabled", "num_key_value_heads", "num_shared_experts"),
)
