"""Mellum 2: Qwen3-MoE with a rope for each kind of layer."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.tensor_names import TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    types = reading.layer_types(fields, 1)
    window = reading.checked_window(fields, types)
    ropes = {
        kind: rotary.rope_of_type(fields, heads.head_dim, rotary.whole_rope(fields, kind, _ROPES))
        for kind in set(types)
    }
    attentions = [
        AttentionSpec(
            *heads,
            scale=heads.head_dim**-0.5,
            rope=ropes[seen],
            head_norm=HeadNorm.EACH,
            qkv_bias=bias,
            o_bias=bias,
            window=window if seen == reading.SLIDING else None,
        )
        for seen in types
    ]
    experts = reading.experts(fields, Routing(1, renormalised=fields.boolean("norm_topk_prob")))
    layers = reading.layers_with_experts(fields, attentions, experts, reading.mlp_layer_types(fields, 0))
    return reading.dense(fields, layers, reading.rms_norm(fields), tensors=TensorNames(left_out=("mtp.",)))


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
