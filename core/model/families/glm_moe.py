"""GLM-4.5, 4.6 and 4.7: experts chosen by sigmoids with a learned correction, after a few dense layers.

GLM-4.7-Flash has latent attention besides.
"""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, HeadNorm, LayerSpec, Routing, Scoring
from ..tensor_names import LATENT_NORMS, LLAMA_NORMS, TensorNames
from . import latent, reading

_MATRICES = ("gate_proj", "up_proj", "down_proj")
_SHARED = {f"mlp.shared_expert.{each}": f"mlp.shared_experts.{each}" for each in _MATRICES}
TENSORS = TensorNames(names={**LLAMA_NORMS, **LATENT_NORMS, **_SHARED})
"""Also of other families with experts after dense layers."""


def _read(fields: ConfigJson) -> ModelConfig:
    heads = reading.heads(fields)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=reading.rope(fields, heads.head_dim),
        head_norm=HeadNorm.EACH if fields.boolean("use_qk_norm") else None,
        qkv_bias=fields.boolean("attention_bias"),
    )
    return sparse_after_dense(fields, attention, routing(fields))


def _read_lite(fields: ConfigJson) -> ModelConfig:
    attention, first = latent.attention(fields, interleaved=fields.boolean("rope_interleave")), None
    if types := fields.texts("mlp_layer_types"):
        first = types.index("sparse") if "sparse" in types else len(types)
        if types != ["dense"] * first + ["sparse"] * (fields.integer("num_hidden_layers") - first):
            raise fields.refuse("mlp_layer_types", "dense layers must come first, and a type is needed for each layer")
    return sparse_after_dense(fields, attention, routing(fields), first=first)


def sparse_after_dense(
    fields: ConfigJson, attention: AttentionSpec, routing: Routing, *, first: int | None = None, bias: bool = False
) -> ModelConfig:
    """A model whose layers have experts, after the `first` ones; None: as many as the configuration says. bias: of a
    dense feed-forward part.
    """
    count = fields.integer("num_hidden_layers")
    shared = fields.integer("n_shared_experts", least=0) * fields.integer("moe_intermediate_size")
    sparse = LayerSpec(attention, reading.experts(fields, routing, shared_size=shared))
    first = min(count, fields.integer("first_k_dense_replace", least=0) if first is None else first)
    dense = [LayerSpec(attention, reading.gated(fields, bias=bias))] * first if first else []
    drafts = range(count, count + fields.integer("num_nextn_predict_layers", least=0))
    names = replace(TENSORS, left_out=tuple(f"model.layers.{layer}." for layer in drafts))
    return reading.dense(fields, [*dense, *[sparse] * (count - first)], reading.rms_norm(fields), tensors=names)


def routing(fields: ConfigJson) -> Routing:
    """Choice by sigmoids with a learned correction."""
    groups, kept = fields.integer("n_group"), fields.integer("topk_group")
    if kept > groups:
        raise fields.refuse("topk_group", f"n_group is {groups}; it can't be more than that")
    return Routing(
        1,
        Scoring.SIGMOID,
        renormalised=fields.boolean("norm_topk_prob"),
        epsilon=1e-20,
        factor=fields.number("routed_scaling_factor"),
        corrected=True,
        groups=groups,
        kept_groups=kept,
    )


GLM_4_MOE = Family(
    "GLM-4.5, 4.6 and 4.7",
    ("Glm4MoeForCausalLM",),
    _read,
    {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    TENSORS,
    notes=f"{reading.EXPERTS_NOTE}; draft layers after the last are left out",
)
GLM_4_MOE_LITE = Family(
    "GLM-4.7-Flash",
    ("Glm4MoeLiteForCausalLM",),
    _read_lite,
    {
        **latent.DEFAULTS,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "rope_interleave": True,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "n_shared_experts": 1,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 1,
    },
    TENSORS,
    notes=f"latents are kept, not keys and values; {reading.EXPERTS_NOTE}; draft layers after the last are left out",
)
