"""Gemma 1, 2 and 3 (its text part, too): scaled embeddings, norms with weights of 1 + w, GELU; from Gemma 2 on norms
around each part and windows, in Gemma 2 soft caps, in Gemma 3 norms of heads and a rope for each kind of layer.
"""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, HeadNorm, LayerSpec, Norms
from ..rope_config import RopeConfig
from ..tensor_names import AROUND_NORMS, TensorNames
from . import reading

_ACTIVATION = "hidden_activation"


def _model(
    fields: ConfigJson,
    ropes: dict[str, RopeConfig],
    types: list[str],
    norms: Norms,
    head_norm: HeadNorm | None = None,
) -> ModelConfig:
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


def _read_1(fields: ConfigJson) -> ModelConfig:
    rope = reading.rope(fields, reading.heads(fields).head_dim)
    return _model(fields, {reading.FULL: rope}, [reading.FULL] * fields.integer("num_hidden_layers"), Norms.BEFORE)


def _read_2(fields: ConfigJson) -> ModelConfig:
    rope = reading.rope(fields, reading.heads(fields).head_dim)
    return _model(
        fields, dict.fromkeys((reading.FULL, reading.SLIDING), rope), reading.layer_types(fields, 2), Norms.AROUND
    )


def _read_3(fields: ConfigJson) -> ModelConfig:
    local = fields.number("rope_local_base_freq", None if fields.has("rope_local_base_freq") else 10000.0)
    ropes = reading.ropes_by_type(fields, {reading.FULL: 1000000.0, reading.SLIDING: local})
    pattern = fields.integer("sliding_window_pattern", None if fields.has("sliding_window_pattern") else 6)
    return _model(fields, ropes, reading.layer_types(fields, pattern), Norms.AROUND, HeadNorm.EACH)


_DEFAULTS = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "vocab_size": 256000,
}
_GEMMA_2 = {**_DEFAULTS, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA_3 = {**_DEFAULTS, "max_position_embeddings": 131072, "vocab_size": 262208}
_NAMES = TensorNames(names=AROUND_NORMS)
_TEXT_AND_IMAGES = TensorNames(
    prefixes=("language_model.model.", "model.language_model."),
    heads=("language_model.lm_head.weight", "lm_head.weight"),
    names=AROUND_NORMS,
    left_out=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)

GEMMA = Family(
    "Gemma",
    ("GemmaForCausalLM",),
    _read_1,
    {**_DEFAULTS, "num_key_value_heads": 16, "query_pre_attn_scalar": None},
)
GEMMA_2 = Family("Gemma 2", ("Gemma2ForCausalLM",), _read_2, _GEMMA_2, _NAMES)
GEMMA_3 = Family("Gemma 3", ("Gemma3ForCausalLM",), _read_3, _GEMMA_3, _NAMES)
GEMMA_3_TEXT = Family("Gemma 3 (text)", ("Gemma3ForConditionalGeneration",), _read_3, _GEMMA_3, _TEXT_AND_IMAGES)
