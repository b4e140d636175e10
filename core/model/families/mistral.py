"""Mistral, Ministral 8B, Mistral Small 3 and Ministral 3: Llama's shape with attention windows."""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, LayerSpec, QueryGrowth
from ..tensor_names import BESIDE_VISION
from . import reading


def _read(fields: ConfigJson) -> ModelConfig:
    heads, window = reading.heads(fields), fields.optional("sliding_window")
    growth = _growth(reading.rope_fields(fields))
    rope = reading.rope(fields, heads.head_dim)
    types = fields.texts("layer_types") and reading.layer_types(fields, 1)
    layers = [
        LayerSpec(
            AttentionSpec(
                *heads,
                scale=heads.head_dim**-0.5,
                rope=rope,
                window=window if seen == reading.SLIDING else None,
                query_growth=growth,
            ),
            reading.gated(fields),
        )
        for seen in types or [reading.SLIDING] * fields.integer("num_hidden_layers")
    ]
    return reading.dense(fields, layers, reading.rms_norm(fields))


def _growth(rope: ConfigJson) -> QueryGrowth | None:
    """Of Ministral 3."""
    beta = reading.optional_number(rope, "llama_4_scaling_beta")
    return None if beta is None else QueryGrowth(beta, rope.integer("original_max_position_embeddings"))


_DEFAULTS = {"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096}

MISTRAL = Family("Mistral", ("MistralForCausalLM",), _read, _DEFAULTS)
MINISTRAL = Family("Ministral 8B", ("MinistralForCausalLM",), _read, _DEFAULTS)
MINISTRAL_3 = Family(
    "Ministral 3",
    ("Ministral3ForCausalLM",),
    _read,
    {
        **_DEFAULTS,
        "head_dim": 128,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "rope_parameters": {
            "type": "yarn", "rope_theta": 1000000.0, "factor": 16.0, "original_max_position_embeddings": 16384,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale_all_dim": 1.0, "mscale": 1.0, "llama_4_scaling_beta": 0.1,
        },
    },
)  # fmt: skip
MISTRAL_3 = Family(
    "Mistral Small 3 and Ministral 3 (text)",
    ("Mistral3ForConditionalGeneration",),
    _read,
    {**_DEFAULTS, "head_dim": 128},
    BESIDE_VISION,
)
