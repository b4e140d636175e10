"""Command R and R+ (Cohere), and Command R7B and Command A (Cohere 2): attention and feed-forward side by side,
LayerNorm, and a scale of the logits. Cohere 2 has no rope in layers without a window.
"""

from __future__ import annotations

from ..config import ModelConfig
from ..config_json import ConfigJson
from ..family import Family
from ..layers import AttentionSpec, HeadNorm, LayerSpec, Norms, NormSpec
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
    return _model(fields, layers)


def _read_1(fields: ConfigJson) -> ModelConfig:
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    rope = reading.rope(fields, heads.head_dim, interleaved=True)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=rope,
        head_norm=HeadNorm.OWN if fields.boolean("use_qk_norm") else None,
        qkv_bias=bias,
        o_bias=bias,
    )
    layers = [LayerSpec(attention, reading.gated(fields), Norms.PARALLEL)] * fields.integer("num_hidden_layers")
    return _model(fields, layers)


def _model(fields: ConfigJson, layers: list[LayerSpec]) -> ModelConfig:
    norm = NormSpec(fields.number("layer_norm_eps"), centered=True, wide=True)
    return reading.dense(fields, layers, norm, logits_scale=fields.number("logit_scale"))


COHERE = Family(
    "Command R and R+, Aya 23 and Aya Expanse",
    ("CohereForCausalLM",),
    _read_1,
    {
        "max_position_embeddings": 8192,
        "layer_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "logit_scale": 0.0625,
        "tie_word_embeddings": True,
    },
    TensorNames(
        names={"attention_norm": "input_layernorm"},
        wrapped=("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    ),
    notes="Command R+, whose heads have norms, on CPUs by PyTorch's operators",
)
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
