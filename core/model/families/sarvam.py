"""Sarvam: GLM-4.5's layers, or DeepSeek-V3's, under other names.

Tests: tests/core/test_families.py
"""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.tensor_names import CORRECTION, QKV, TensorNames
from . import deepseek, glm_moe, reading
from .defaults import UNREAD, Defaults

_FIELDS = {
    "n_routed_experts": "num_experts",
    "n_shared_experts": "num_shared_experts",
    "attention_bias": "use_qkv_bias",
    "num_nextn_predict_layers": "num_mtp_layers",
}


def _read(fields: ConfigJson) -> ModelConfig:
    model = glm_moe.GLM_4_MOE.read(reading.renamed(fields, _FIELDS))
    return replace(model, tensors=replace(model.tensors, published=(_PUBLISHED, _BARE)))


def _read_latent(fields: ConfigJson) -> ModelConfig:
    fields = reading.renamed(fields, {name: other for name, other in _FIELDS.items() if name != "attention_bias"})
    for name in ("rope_scaling", "rope_parameters"):
        rope = fields.raw.get(name)
        if isinstance(rope, dict) and "deepseek_yarn" in (rope.get("type"), rope.get("rope_type")):
            others = {field: value for field, value in rope.items() if field not in ("type", "rope_type")}
            fields = fields.with_values({name: {**others, "rope_type": "yarn"}})
    return deepseek.DEEPSEEK_V3.read(fields)


_PUBLISHED = TensorNames(
    prefixes=("model.",),
    embeddings="word_embeddings",
    names={
        **glm_moe.NAMES,
        "self_attn.o_proj": "attention.dense",
        "self_attn.q_norm": "attention.query_layernorm",
        "self_attn.k_norm": "attention.key_layernorm",
        CORRECTION: "mlp.gate.expert_bias",
    },
    fused={"attention.query_key_value": QKV},
)
#: As transformers saves a model without a head.
_BARE = replace(_PUBLISHED, prefixes=("",), embeddings="embed_tokens")

SARVAM = Family(
    "Sarvam-MoE (30B)",
    ("SarvamMoEForCausalLM",),
    _read,
    Defaults(
        "Glm4MoeConfig",
        {
            "num_key_value_heads": 4,
            "rms_norm_eps": 1e-06,
            "partial_rotary_factor": 1.0,
            "intermediate_size": 8192,
            "moe_intermediate_size": 1024,
            "num_experts_per_tok": 6,
            "routed_scaling_factor": 2.5,
            "num_nextn_predict_layers": 0,
            "head_dim": 64,
            "rope_theta": 8000000.0,
            "use_qk_norm": True,
        },
    ),
    glm_moe.TENSORS,
    model_types=("sarvam_moe",),
)
SARVAM_MLA = Family(
    "Sarvam-MLA (105B)",
    ("SarvamMLAForCausalLM",),
    _read_latent,
    Defaults(
        "DeepseekV3Config",
        {
            "q_lora_rank": None,
            "intermediate_size": 16384,
            "n_routed_experts": 128,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "num_nextn_predict_layers": 0,
            "num_key_value_heads": UNREAD,
        },
    ),
    glm_moe.TENSORS,
    model_types=("sarvam_mla",),
    notes=reading.LATENTS_NOTE,
    nulls=("norm_topk_prob", "num_key_value_heads", "rope_interleave", "v_head_dim"),
)
