"""Gemma 1, and the parts that all versions share: scaled embeddings, norms with weights of 1 + w, GELU."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, HeadNorm, LayerSpec, Norms
from ..rope_config import RopeConfig
from . import reading

_ACTIVATION = "hidden_activation"


def read_layers(
    fields: ConfigJson,
    ropes: dict[str, RopeConfig],
    types: list[str],
    norms: Norms,
    head_norm: HeadNorm | None = None,
) -> ModelConfig:
    """A Gemma of any version. types: of its layers, each with its rope."""
    if fields.boolean("use_bidirectional_attention"):
        raise fields.refuse("use_bidirectional_attention", "only causal attention is supported")
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    window = fields.optional("sliding_window")
    scale = fields.number("query_pre_attn_scalar", None if fields.has("query_pre_attn_scalar") else heads.head_dim)
    layers = [
        LayerSpec(
            AttentionSpec(
                *heads,
                scale=scale**-0.5,
                rope=ropes[seen],
                window=window if seen == reading.SLIDING else None,
                softcap=reading.optional_number(fields, "attn_logit_softcapping"),
                head_norm=head_norm,
                qkv_bias=bias,
                o_bias=bias,
            ),
            reading.gated(fields, _ACTIVATION if fields.has(_ACTIVATION) else "hidden_act"),
            norms,
        )
        for seen in types
    ]
    return reading.dense(
        fields,
        layers,
        reading.rms_norm(fields, one_plus=True),
        embedding_multiplier=fields.integer("hidden_size") ** 0.5,
        logits_softcap=reading.optional_number(fields, "final_logit_softcapping"),
    )


def _read(fields: ConfigJson) -> ModelConfig:
    rope = reading.rope(fields, reading.heads(fields).head_dim)
    return read_layers(fields, {reading.FULL: rope}, [reading.FULL] * fields.integer("num_hidden_layers"), Norms.BEFORE)


DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "vocab_size": 256000,
}
GEMMA = Family(
    "Gemma",
    ("GemmaForCausalLM",),
    _read,
    {**DEFAULTS, "num_key_value_heads": 16, "query_pre_attn_scalar": None},
)
