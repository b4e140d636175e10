"""JetMoE: a mixture of attention heads, and one of feed-forward experts, each with a bias of its sum.

Tests: tests/core/layers/test_query_experts.py, tests/core/paths
"""

from __future__ import annotations

from functools import partial

from ...config_json import ConfigJson
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.feed_forward import Routing, Scoring
from ...specs.norms import NormSpec
from ...specs.tensor_names import LLAMA_NORMS, TensorNames
from .. import reading, rotary
from ..defaults import TOKENS, Defaults
from .layer import JetMoeLayer
from .ops import QueryExperts


def _read(fields: ConfigJson) -> ModelConfig:
    fields = reading.renamed(fields, {"head_dim": "kv_channels"})
    fields = fields.with_values({"hidden_act": fields.text("activation_function")})
    experts = reading.experts(fields, Routing(1, Scoring.SOFTMAX_OF_CHOSEN), size="intermediate_size")
    queries = QueryExperts(experts.count, experts.routing)
    count = fields.integer("num_key_value_heads") * queries.per_token
    attention = rotary.attention(fields.with_values({"num_attention_heads": count}), bias=False)
    kind, last_norm = partial(JetMoeLayer, queries=queries), reading.rms_norm(fields)
    # transformers gives norms of layers no eps.
    return reading.decoder(fields, attention, experts, NormSpec(1e-6), kind=kind, last_norm=last_norm)


JETMOE = Family(
    "JetMoE",
    ("JetMoeForCausalLM",),
    _read,
    Defaults("JetMoeConfig", {"head_dim": 128}, takes=TOKENS),
    TensorNames(
        names={
            **LLAMA_NORMS,
            "self_attn.query_router": "self_attention.experts.router.layer",
            "self_attn.experts.bias": "self_attention.experts.bias",
            "mlp.gate": "mlp.router.layer",
        },
        fused={"self_attention.kv_proj": ("self_attn.k_proj", "self_attn.v_proj")},
        stacked_experts={
            "mlp.input_linear.weight": ("gate_proj", "up_proj"),
            "mlp.output_linear.weight": ("down_proj",),
        },
        stacked={
            "self_attention.experts.input_linear.weight": ("self_attn.experts.{}.q_proj",),
            "self_attention.experts.output_linear.weight": ("self_attn.experts.{}.o_proj",),
        },
    ),
    notes=f"adapters on attention's experts are refused; `num_attention_heads` has no effect; {reading.ON_OPERATORS}",
)
