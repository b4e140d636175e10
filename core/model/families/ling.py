"""Ling 2.6: layers of Kimi Delta Attention, whose decays have a bound and are made without latents, and of latent
attention with a gate of each head; DeepSeek-V3's experts after the first layers.

Tests: tests/core/layers/test_ling.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson, is_number
from ..specs.attention import OutputGate
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.recurrent import GatedDeltaSpec
from ..specs.tensor_names import CORRECTION, JOINED_CONVS, TensorNames
from . import glm_moe, kimi_linear, latent, reading, rotary
from .defaults import Defaults

_LINEAR = "linear_attention"

#: Names of fields here, and in checkpoints.
_FIELDS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_experts": "num_local_experts",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "num_nextn_predict_layers": "num_mtp_layers",
}

#: What transformers reads again where it has saved it, and the fields that others have it in.
_LINEAR_FIELDS = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_attention_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def _read(fields: ConfigJson) -> ModelConfig:
    fields = reading.renamed(fields, _FIELDS)
    reading.check_silu(fields, "Kimi Delta Attention")
    if fields.boolean("tie_word_embeddings"):
        raise fields.refuse("tie_word_embeddings", "transformers does not tie them for this family; set it to false")
    rotary.check_original(rotary.rope_fields(fields))
    attention = replace(latent.attention(fields, interleaved=True), output_gate=OutputGate.PER_HEAD)
    mixers = {reading.FULL: attention, _LINEAR: _delta(fields)}
    types = reading.layer_types(fields, fields.integer("layer_group_size"), other=_LINEAR)
    has_experts = reading.mlp_layer_types(fields)
    model = glm_moe.model(fields, [mixers[kind] for kind in types], _NAMES, has_experts=has_experts)
    published = replace(_PUBLISHED, left_out=model.tensors.left_out)
    return replace(model, tensors=replace(model.tensors, published=(published,)))


def _delta(fields: ConfigJson) -> GatedDeltaSpec:
    own = {name: fields.integer(name if name in fields.raw else other) for name, other in _LINEAR_FIELDS.items()}
    if own["linear_conv_kernel_dim"] < 2:
        raise fields.refuse("short_conv_kernel_size", "a whole number of at least 2 is needed")
    bound = _bound(fields) if fields.boolean("kda_safe_gate") else 0.0
    found = kimi_linear.delta(fields.with_values(own), reading.rms_norm(fields).eps, bound)
    return replace(found, gate_rank=0)


def _bound(fields: ConfigJson) -> float:
    """The least logarithm of a decay."""
    name = "kda_lower_bound"
    bound = fields.raw.get(name, -5.0)
    if not is_number(bound) or not -1e12 <= bound < 0:
        raise fields.refuse(name, "a finite number below 0 is needed, since decays with others would grow")
    return float(bound)


_FORGET_GATE = ("f_proj", "A_log", "dt_bias")
_NAMES = TensorNames(
    names={
        **glm_moe.NAMES,
        **{f"self_attn.{each}": f"self_attn.forget_gate.{each}" for each in _FORGET_GATE},
        "self_attn.norm": "self_attn.o_norm",
    },
    joined=JOINED_CONVS,
)
_OTHERS = ("q_proj", "q_a_proj", "q_b_proj", "k_proj", "v_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "b_proj")
_PUBLISHED = TensorNames(
    prefixes=("model.",),
    embeddings="word_embeddings",
    names={
        **glm_moe.NAMES,
        **{f"self_attn.{each}": f"attention.{each}" for each in (*_OTHERS, *_FORGET_GATE, "conv1d")},
        "self_attn.q_norm": "attention.q_a_layernorm",
        "self_attn.k_norm": "attention.kv_a_layernorm",
        "self_attn.norm": "attention.o_norm",
        "self_attn.o_proj": "attention.dense",
        CORRECTION: "mlp.gate.expert_bias",
    },
    joined=JOINED_CONVS,
)
LING_2_6 = Family(
    "Ling 2.6",
    ("BailingHybridForCausalLM",),
    _read,
    Defaults(
        "BailingHybridConfig",
        {"num_experts": 512, "num_nextn_predict_layers": 1},
        takes=("intermediate_size", "eos_token_id"),
    ),
    _NAMES,
    notes=f"{reading.LATENTS_NOTE}; draft layers after the last are left out",
    nulls=("num_key_value_heads",),
)
