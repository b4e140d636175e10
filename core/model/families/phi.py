"""Phi-3, Phi-3.5 mini and Phi-4: q, k and v are one projection, and so are gate and up."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, LayerSpec
from ..tensor_names import FUSED_GATE_UP, FUSED_QKV, TensorNames
from . import reading


def _read(fields: ConfigJson) -> ModelConfig:
    heads = reading.heads(fields)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=reading.rope(fields, heads.head_dim),
        window=fields.optional("sliding_window"),
    )
    layer = LayerSpec(attention, reading.gated(fields))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields))


PHI_3 = Family(
    "Phi-3 and Phi-4",
    ("Phi3ForCausalLM",),
    _read,
    {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5},
    TensorNames(fused={**FUSED_QKV, **FUSED_GATE_UP}),
    notes="with longrope, up to the original positions unless `--max-model-len` asks for more",
)
