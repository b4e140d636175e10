"""Command R7B and Command A (Cohere 2): attention and feed-forward side by side, LayerNorm, a scale of the logits, and
no rope in layers without a window.
"""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, LayerSpec, Norms, NormSpec
from ..tensor_names import TensorNames
from . import reading


def _read(fields: ConfigJson) -> ModelConfig:
    heads, window, bias = reading.heads(fields), fields.optional("sliding_window"), fields.boolean("attention_bias")
    rope = reading.rope(fields, heads.head_dim, interleaved=True)
    pattern = fields.integer("sliding_window_pattern", None if fields.has("sliding_window_pattern") else 4)
    layers = [
        LayerSpec(
            AttentionSpec(
                *heads,
                scale=heads.head_dim**-0.5,
                rope=rope if seen == reading.SLIDING and window else None,
                window=window if seen == reading.SLIDING else None,
                qkv_bias=bias,
                o_bias=bias,
            ),
            reading.gated(fields),
            Norms.PARALLEL,
        )
        for seen in reading.layer_types(fields, pattern)
    ]
    norm = NormSpec(fields.number("layer_norm_eps"), centered=True, wide=True)
    return reading.dense(fields, layers, norm, logits_scale=fields.number("logit_scale"))


COHERE_2 = Family(
    "Command R7B and Command A",
    ("Cohere2ForCausalLM",),
    _read,
    {
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "sliding_window": 4096,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
    },
    TensorNames(names={"attention_norm": "input_layernorm"}),
)
