"""Hunyuan 3: experts chosen by sigmoids with a learned correction, and norms of heads."""

from __future__ import annotations

from dataclasses import replace

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, HeadNorm, Routing, Scoring
from ..tensor_names import LLAMA_NORMS, TensorNames
from ..tensor_parts import CORRECTION
from . import reading


def _read_3(fields: ConfigJson) -> ModelConfig:
    heads, bias, count = reading.heads(fields), fields.boolean("attention_bias"), fields.integer("num_hidden_layers")
    if fields.boolean("mlp_bias"):
        raise fields.refuse("mlp_bias", "experts have no biases here; only false is supported")
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=reading.rope(fields, heads.head_dim),
        head_norm=HeadNorm.EACH,
        qkv_bias=bias,
        o_bias=bias,
    )
    routing = Routing(
        1,
        Scoring.SIGMOID,
        renormalised=True,
        epsilon=1e-20,
        factor=fields.number("router_scaling_factor"),
        corrected=True,
    )
    shared = reading.number_of(fields, "num_shared_experts") * fields.integer("moe_intermediate_size")
    experts = reading.experts(fields, routing, shared_size=shared)
    layers = reading.layers_with_experts(fields, [attention] * count, experts, reading.mlp_layer_types(fields, 1))
    tensors = replace(_NAMES_3, left_out=(f"model.layers.{count}.",))
    return reading.dense(fields, layers, reading.rms_norm(fields), tensors=tensors)


_MATRICES = ("gate_proj", "up_proj", "down_proj")
_NAMES_3 = TensorNames(
    names={
        **LLAMA_NORMS,
        **{f"mlp.shared_expert.{each}": f"mlp.shared_mlp.{each}" for each in _MATRICES},
        "mlp.gate": "mlp.router.gate",
        CORRECTION: "mlp.expert_bias",
    },
    adapter_names={f"mlp.shared_expert.{each}": f"mlp.shared_experts.{each}" for each in _MATRICES},
)
HUNYUAN_3 = Family(
    "Hunyuan 3",
    ("HYV3ForCausalLM",),
    _read_3,
    {
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 11158840.0,
        "intermediate_size": 13312,
        "moe_intermediate_size": 1536,
        "num_experts": 192,
        "num_experts_per_tok": 8,
        "num_shared_experts": 1,
        "router_scaling_factor": 2.826,
    },
    notes=f"{reading.EXPERTS_NOTE}; the draft layer after the last is left out",
)
