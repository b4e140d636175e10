"""Mistral, Ministral 8B, Mistral Small 3 and Ministral 3: Llama's shape with attention windows."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, LayerSpec
from ..tensor_names import TensorNames
from . import reading

_TEXT_AND_IMAGES = TensorNames(
    prefixes=("language_model.model.", "model.language_model."),
    heads=("language_model.lm_head.weight", "lm_head.weight"),
    left_out=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector."),
)


def _read(fields: ConfigJson) -> ModelConfig:
    heads, window = reading.heads(fields), fields.optional("sliding_window")
    parameters = reading.rope_fields(fields)
    if parameters.has("llama_4_scaling_beta") and parameters.raw["llama_4_scaling_beta"]:
        raise parameters.refuse("llama_4_scaling_beta", "queries that grow with their position are not supported")
    rope = reading.rope(fields, heads.head_dim)
    types = fields.texts("layer_types") and reading.layer_types(fields, 1)
    layers = [
        LayerSpec(
            AttentionSpec(
                *heads, scale=heads.head_dim**-0.5, rope=rope, window=window if seen == reading.SLIDING else None
            ),
            reading.gated(fields),
        )
        for seen in types or [reading.SLIDING] * fields.integer("num_hidden_layers")
    ]
    return reading.dense(fields, layers, reading.rms_norm(fields))


_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}

MISTRAL = Family("Mistral", ("MistralForCausalLM",), _read, _DEFAULTS)
MINISTRAL = Family("Ministral 8B", ("MinistralForCausalLM",), _read, _DEFAULTS)
MISTRAL_3 = Family(
    "Mistral Small 3 (text)",
    ("Mistral3ForConditionalGeneration",),
    _read,
    {**_DEFAULTS, "head_dim": 128},
    _TEXT_AND_IMAGES,
)
