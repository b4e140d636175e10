"""A.X K1 and K2. K1 is DeepSeek-V3 with a norm behind the experts, K2 DeepSeek-V3.2 with gates: of what norms before
its parts give, and of attention's output.

Tests: tests/core/layers/test_latents.py, tests/core/layers/test_latent_gates.py
"""

from __future__ import annotations

from dataclasses import replace

from ...config_json import ConfigJson
from ...specs.attention import AttentionSpec, OutputGate
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.norms import Norms
from .. import glm_moe, latent, reading
from ..defaults import Defaults
from .layer import AxLayer

#: The norms before the parts of a layer with experts; others gate the first alone.
_BOTH = ("attention_norm", "mlp_norm")


def _read_k1(fields: ConfigJson) -> ModelConfig:
    has_experts = _has_experts(fields)
    latent.check_query_latents(fields)
    attention = latent.attention(fields, interleaved=fields.boolean("rope_interleave"))
    model = glm_moe.model(_without_drafts(fields), attention, _NAMES_K1, has_experts=has_experts)
    layers = [replace(each, norms=Norms.AFTER_MLP) if each.experts else each for each in model.layers]
    return replace(model, layers=tuple(layers))


def _read_k2(fields: ConfigJson) -> ModelConfig:
    has_experts, rank = _has_experts(fields), fields.integer("gated_norm_rank")
    for one, other in (("n_group", "topk_group"), ("topk_group", "n_group")):
        if fields.has(one) and not fields.has(other):
            raise fields.refuse(other, "n_group and topk_group must be set together, or neither")
    if not fields.has("n_group"):
        fields = fields.with_values({"n_group": 1, "topk_group": 1})
    routing = replace(reading.routing_in_groups(fields), masked_score=0.0)
    mixers = [_gated(each) for each in latent.indexed(fields, interleaved=False)]
    model = glm_moe.model(_without_drafts(fields), mixers, _NAMES_K2, has_experts=has_experts, routing=routing)
    layers = [
        AxLayer(each.mixer, each.feed_forward, rank=rank, gated=_BOTH if each.experts else _BOTH[:1])
        for each in model.layers
    ]
    return replace(model, layers=tuple(layers))


def _gated(mixer: AttentionSpec) -> AttentionSpec:
    """Attention with gates, which stand beside queries."""
    return replace(mixer, output_gate=OutputGate.BESIDE_QUERIES)


def _has_experts(fields: ConfigJson) -> list[bool]:
    """Which layers have experts: by `mlp_layer_types`, or one in every `moe_layer_freq` after the first ones."""
    first, every = fields.integer("first_k_dense_replace", 1, least=0), fields.integer("moe_layer_freq", 1)
    if fields.texts("mlp_layer_types"):
        return reading.mlp_layer_types(fields, 0)
    return [index >= first and index % every == 0 for index in range(fields.integer("num_hidden_layers"))]


def _without_drafts(fields: ConfigJson) -> ConfigJson:
    """Fields of DeepSeek-V3 that these families don't have, so that `glm_moe.model` finds neither."""
    return fields.with_values({"first_k_dense_replace": 0, "num_nextn_predict_layers": 0})


_NAMES_K1 = replace(
    glm_moe.TENSORS,
    names={**glm_moe.NAMES, "mlp_out_norm": "mlp.post_mlp_layernorm"},
    older={"mlp_out_norm": "post_mlp_layernorm"},
)
_NORMS_K2 = {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
_GATES_K2 = {"fc1": "W_down", "fc2": "W_up"}
#: Norms without gates are where others have them inside, and published checkpoints have other names of gates.
_NAMES_K2 = replace(
    glm_moe.TENSORS,
    names={
        **glm_moe.NAMES,
        **{norm: f"{name}.norm" for norm, name in _NORMS_K2.items()},
        **{f"norm_gates.{norm}.{part}": f"{name}.mlp.{part}" for norm, name in _NORMS_K2.items() for part in _GATES_K2},
        "self_attn.q_b_proj": "self_attn.q_gate_proj",
    },
    older={
        **_NORMS_K2,
        **{
            f"norm_gates.{norm}.{part}": f"{name}.{older}"
            for norm, name in _NORMS_K2.items()
            for part, older in _GATES_K2.items()
        },
    },
)

AX_K1 = Family(
    "A.X K1",
    ("AXK1ForCausalLM",),
    _read_k1,
    Defaults("AXK1Config", takes=("intermediate_size",)),
    _NAMES_K1,
    notes=reading.LATENTS_NOTE,
    nulls=("norm_topk_prob", "rope_interleave"),
)
AX_K2 = Family(
    "A.X K2",
    ("AXK2ForCausalLM",),
    _read_k2,
    Defaults("AXK2Config", takes=("intermediate_size",)),
    _NAMES_K2,
    notes=reading.INDEXER_NOTE,
    nulls=("n_group", "topk_group"),
)
