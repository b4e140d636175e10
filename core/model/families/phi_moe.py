"""Phi-3.5-MoE: experts that are chosen one after another (sparse mixer), LayerNorms, and logits with a bias.

Tests: tests/core/test_experts.py, tests/core/model/specs/test_model_config.py
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson, is_number
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing, Scoring
from . import mixtral, reading, rotary
from .defaults import Defaults

_PER_TOKEN = 2
"""Experts of a token in transformers' code, whatever the field says."""


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.integer(name := "num_experts_per_tok") != _PER_TOKEN:
        raise fields.refuse(name, f"transformers always chooses {_PER_TOKEN} experts; only that is supported")
    name = "router_jitter_noise"
    jitter = fields.raw[name] if name in fields.raw else fields.number(name)
    if not is_number(jitter) or jitter < 0:
        raise fields.refuse(name, "a number of at least 0 is needed")
    routing = Routing(_PER_TOKEN, Scoring.SPARSE_MIXER, jitter=float(jitter))
    attention = rotary.attention(fields, window=fields.optional("sliding_window"))
    rope, most = attention.rope, fields.integer("max_position_embeddings")
    if rope is not None and rope.type == "longrope":
        scaling = rotary.rope_fields(fields)
        short, long = scaling.number("short_mscale"), scaling.number("long_mscale")
        # transformers has the short factors at every length, and changes cos and sin with the length of a request
        rope = replace(rope, long_factors=rope.short_factors, attention_factor=short)
        most = most if short == long else min(most, rope.original_max_position_embeddings)
    elif rope is not None and rope.type != "default":
        raise rotary.rope_fields(fields).refuse("rope_type", "not supported; supported: default, longrope")
    experts = reading.experts(fields, routing, size="intermediate_size")
    return reading.decoder(
        fields,
        replace(attention, rope=rope),
        experts,
        reading.layer_norm(fields, "rms_norm_eps"),
        max_position_embeddings=most,
        head_bias=fields.boolean("lm_head_bias"),
    )


PHI_MOE = Family(
    "Phi-3.5-MoE",
    ("PhimoeForCausalLM", "PhiMoEForCausalLM"),
    _read,
    Defaults("PhimoeConfig"),
    replace(mixtral.MIXTRAL.tensors, adapter_names={"mlp.gate": "mlp.router"}),
    notes="as transformers computes longrope, with the short factors at every length",
)
