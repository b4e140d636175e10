"""ZAYA: convolutions of queries and keys before attention, half of the values delayed by a token, a residual stream
with learned factors, and experts whose routers go over layers.

Tests: tests/core/layers/test_convolved_heads.py, tests/core/paths
"""

from __future__ import annotations

from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Routing
from ...specs.tensor_names import CORRECTION, LLAMA_NORMS, TensorNames
from .. import reading, rotary
from ..defaults import TOKENS, Defaults
from .head_conv import HeadConvSpec
from .layer import ZayaExperts, ZayaLayer

_FULL, _SLIDING = "hybrid", "hybrid_sliding"

#: Where `rope_parameters` is missing.
_ROPES = {
    _FULL: {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    _SLIDING: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5},
}


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.boolean("attention_bias"):
        why = "delayed values of a first token would be a bias, and states begin with zeros; only false is supported"
        raise fields.refuse("attention_bias", why)
    if fields.integer("num_experts_per_tok") != 1:
        raise fields.refuse("num_experts_per_tok", "transformers has one expert for a token here; only 1 is supported")
    heads, types = reading.heads(fields), _layer_types(fields)
    mixers = {kind: _attention(fields, heads, kind) for kind in dict.fromkeys(types)}
    sizes = fields.integer("cca_time0"), fields.integer("cca_time1")
    experts = reading.experts(
        fields,
        Routing(1, corrected=True),
        kind=ZayaExperts,
        router_size=fields.integer("router_hidden_size"),
    )
    convs = HeadConvSpec(*heads, sizes)
    layers = [ZayaLayer(mixers[kind], experts, convolutions=convs, is_first=at == 0) for at, kind in enumerate(types)]
    norm, has_bias = reading.rms_norm(fields), fields.boolean("lm_head_bias")
    return reading.dense(fields, layers, norm, scales_embeddings=True, head_bias=has_bias)


def _layer_types(fields: ConfigJson) -> list[str]:
    count, types = fields.integer("num_hidden_layers"), fields.texts("layer_types")
    types = types or [_FULL] * count
    return reading.checked_types(fields, types, _ROPES)


def _attention(fields: ConfigJson, heads: reading.Heads, kind: str) -> AttentionSpec:
    window = fields.optional("sliding_window") if kind == _SLIDING else None
    if window is None and kind == _SLIDING:
        raise fields.refuse("sliding_window", f"layers of {_SLIDING} need one")
    own = fields.with_defaults({"partial_rotary_factor": 1.0})
    rope = rotary.rope_of_type(own, heads.head_dim, rotary.whole_rope(fields, kind, _ROPES))
    return AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=rope, window=window)


_INPUTS = ("q_proj", "k_proj", "v_proj_current", "v_proj_delayed")

ZAYA = Family(
    "ZAYA",
    ("ZayaForCausalLM",),
    _read,
    Defaults("ZayaConfig", takes=TOKENS),
    TensorNames(
        names={
            **LLAMA_NORMS,
            **{f"self_attn.{each}": f"self_attn.qkv_proj.{each}" for each in _INPUTS},
            "mlp.gate": "mlp.gate.router_mlp.out_proj",
            CORRECTION: "mlp.gate.balancing_biases",
            "mlp.router.down_proj": "mlp.gate.down_proj",
            "mlp.router.states_scale": "mlp.gate.router_states_scale",
            **{f"mlp.router.{each}": f"mlp.gate.router_mlp.{each}" for each in ("fc1", "fc2", "norm")},
        },
    ),
    notes="`attention_bias`, and LoRA biases of `v_proj_delayed`, are refused; the residual stream, which transformers "
    "keeps in float32, has the model's dtype; on one rank, "
    f"{reading.ON_OPERATORS}",
)
