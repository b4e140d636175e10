"""Fields of `config.json` that make another family of a geometry of Llama's shape, for `--family`."""

from __future__ import annotations

from typing import Any

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def fields_of(family: str, layers: int, head_dim: int) -> dict[str, Any]:
    """What replaces Llama's fields. Windows are of 512 tokens, in as many layers as the family's models have them."""
    every = {"gemma-2": 2, "gemma-3": 6, "exaone-4": 4, "cohere-2": 4}.get(family)
    fields: dict[str, Any] = {"head_dim": head_dim, **FAMILIES[family]}
    if every is not None:
        kinds = [_GLOBAL if layer % every == every - 1 else _LOCAL for layer in range(layers)]
        fields |= {"sliding_window": 512, "layer_types": kinds}
    return fields


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    "granite": {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.0078125,
        "logits_scaling": 8.0,
    },
    "phi-3": {"architectures": ["Phi3ForCausalLM"], "model_type": "phi3"},
    "smollm3": {"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3", "no_rope_layer_interval": 4},
    "olmo-2": {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
    "glm-4": {"architectures": ["Glm4ForCausalLM"], "model_type": "glm4"},
    "gemma-2": {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "query_pre_attn_scalar": 64},
    "gemma-3": {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "query_pre_attn_scalar": 64},
    "exaone-4": {"architectures": ["Exaone4ForCausalLM"], "model_type": "exaone4"},
    "cohere-2": {"architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "logit_scale": 0.25},
    "qwen3.5": {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 8,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
    },
}
"""Of each family."""
