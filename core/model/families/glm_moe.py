"""GLM-4.5, 4.6 and 4.7, GLM-4.5V and GLM-5: experts chosen by sigmoids with a learned correction, after a few dense
layers.

GLM-4.7-Flash has latent attention besides; so has GLM-5, to the tokens that an indexer chooses, for several layers in
some versions.

Tests: tests/core/test_experts.py, tests/core/layers/test_latents.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.recurrent import RecurrentSpec
from ..specs.tensor_names import LATENT_NORMS, LLAMA_NORMS, SHARED_EXPERTS, TEXT_AND_IMAGES, TensorNames
from ..specs.vision import SEES
from . import glm, latent, qwen, reading, rotary
from .defaults import UNREAD, Defaults

NAMES = {**LLAMA_NORMS, **LATENT_NORMS, **SHARED_EXPERTS}
TENSORS = TensorNames(names=NAMES)


def _read(fields: ConfigJson) -> ModelConfig:
    head_norm = HeadNorm.EACH if fields.boolean("use_qk_norm") else None
    return model(fields, _attention(fields, head_norm=head_norm))


def _read_text(fields: ConfigJson) -> ModelConfig:
    return model(fields, _attention(fields, adjust=glm.AXES), replace(TEXT_AND_IMAGES, names=NAMES))


def _read_lite(fields: ConfigJson) -> ModelConfig:
    attention = latent.attention(fields, interleaved=fields.boolean("rope_interleave"))
    return model(fields, attention, has_experts=reading.mlp_layer_types(fields))


def _read_5(fields: ConfigJson) -> ModelConfig:
    fields.states("indexer_rope_interleave", True)
    mixers = latent.indexed(fields, interleaved=True, kinds=latent.indexer_kinds(fields))
    return model(fields, mixers, has_experts=reading.mlp_layer_types(fields))


def _attention(fields: ConfigJson, **options: Any) -> AttentionSpec:
    return rotary.attention(fields, qkv_bias=fields.boolean("attention_bias"), **options)


def model(
    fields: ConfigJson,
    mixer: AttentionSpec | Sequence[AttentionSpec | RecurrentSpec],
    tensors: TensorNames = TENSORS,
    *,
    routing: Routing | None = None,
    has_experts: Sequence[bool] = (),
) -> ModelConfig:
    """Some dense layers, and then layers with experts as DeepSeek-V3 has them. mixer: of all layers, or of each.
    tensors: draft layers after the last are left out, too. routing: None: DeepSeek-V3's. has_experts: which layers
    have; empty: those after the first ones.
    """
    count, first = fields.integer("num_hidden_layers"), reading.number_of(fields, "first_k_dense_replace")
    experts = reading.experts(fields, routing or reading.routing_in_groups(fields), shared="n_shared_experts")
    mixers = [mixer] * count if isinstance(mixer, AttentionSpec) else mixer
    has_experts = has_experts or [index >= first for index in range(count)]
    drafts = range(count, count + reading.number_of(fields, "num_nextn_predict_layers"))
    left_out = (f"{prefix}layers.{layer}." for layer in drafts for prefix in tensors.prefixes if prefix)
    if not any(isinstance(each, AttentionSpec) and each.latent for each in mixers):
        names = {part: name for part, name in tensors.names.items() if part not in LATENT_NORMS}
        tensors = replace(tensors, names=names)
    tensors = replace(tensors, left_out=(*tensors.left_out, *left_out))
    return reading.decoder(fields, mixers, experts, has_experts=has_experts, tensors=tensors)


GLM_4_MOE = Family(
    "GLM-4.5, 4.6 and 4.7",
    ("Glm4MoeForCausalLM",),
    _read,
    Defaults("Glm4MoeConfig", {"num_nextn_predict_layers": 1}, takes=("intermediate_size",)),
    TENSORS,
    notes="draft layers after the last are left out",
)
GLM_4_5V = Family(
    "GLM-4.5V",
    ("Glm4vMoeForConditionalGeneration",),
    _read_text,
    Defaults("Glm4vMoeTextConfig", {"num_nextn_predict_layers": 1}, takes=("intermediate_size",)),
    replace(TEXT_AND_IMAGES, names=NAMES),
    notes=f"{SEES}; draft layers after the last are left out",
    vision=replace(qwen.VISION, token=151363),
)
GLM_4_MOE_LITE = Family(
    "GLM-4.7-Flash",
    ("Glm4MoeLiteForCausalLM",),
    _read_lite,
    Defaults(
        "Glm4MoeLiteConfig",
        {"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "num_key_value_heads": UNREAD},
        takes=("intermediate_size",),
    ),
    TENSORS,
    notes=f"{reading.LATENTS_NOTE}; draft layers after the last are left out",
)
GLM_5 = Family(
    "GLM-5",
    ("GlmMoeDsaForCausalLM",),
    _read_5,
    Defaults("GlmMoeDsaConfig", {"num_nextn_predict_layers": 1}, takes=("intermediate_size",)),
    TENSORS,
    notes=f"{reading.INDEXER_NOTE}; draft layers after the last are left out",
    nulls=("indexer_types", "index_topk_pattern"),
)
