"""Command R and R+ (Cohere), and Command R7B and Command A (Cohere 2): attention and feed-forward side by side,
LayerNorm, and a scale of the logits. Cohere 2 has no rope in layers without a window.

Command Compass has a rope for each type of layers.

Tests: tests/core/test_families.py, tests/core/test_experts.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.layers import LayerSpec
from ..specs.norms import NormKind, Norms, NormSpec
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    rope = rotary.rope(fields, heads.head_dim, interleaved=True)
    pattern = fields.integer("sliding_window_pattern", None if fields.has("sliding_window_pattern") else 4)
    types = reading.layer_types(fields, pattern)
    window = reading.checked_window(fields, types)
    layers = [
        DecoderLayer(
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
        for seen in types
    ]
    return model_of(fields, layers)


def _read_1(fields: ConfigJson) -> ModelConfig:
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    rope = rotary.rope(fields, heads.head_dim, interleaved=True)
    attention = AttentionSpec(
        *heads,
        scale=heads.head_dim**-0.5,
        rope=rope,
        head_norm=HeadNorm.OWN if fields.boolean("use_qk_norm") else None,
        qkv_bias=bias,
        o_bias=bias,
    )
    layers = [DecoderLayer(attention, reading.gated(fields), Norms.PARALLEL)] * fields.integer("num_hidden_layers")
    return model_of(fields, layers)


def _read_compass(fields: ConfigJson) -> ModelConfig:
    """Layers of each type have a rope of their own, which turns halves; null: they have none."""
    heads, bias = reading.heads(fields.without("head_dim")), fields.boolean("attention_bias")
    if not fields.is_missing("head_dim") and fields.integer("head_dim") != heads.head_dim:
        raise fields.refuse("head_dim", f"only hidden_size / num_attention_heads is supported: {heads.head_dim}")
    count = fields.integer("num_hidden_layers")
    types = (fields.texts("layer_types") and reading.layer_types(fields, 1)) or [reading.FULL] * count
    ropes = {kind: _rope_of_type(fields, kind, heads.head_dim) for kind in dict.fromkeys(types)}
    attention = AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=None, qkv_bias=bias, o_bias=bias)
    layers = [
        DecoderLayer(replace(attention, rope=ropes[kind], window=window), reading.gated(fields), Norms.PARALLEL)
        for kind, window in zip(types, reading.windows_of(fields, types), strict=True)
    ]
    norm = NormSpec(fields.number("layer_norm_eps"), NormKind.LAYER, wide=True)
    return reading.dense(fields, layers, norm, logits_scale=reading.optional_number(fields, "logit_scale") or 1.0)


def _rope_of_type(fields: ConfigJson, kind: str, head_dim: int) -> RopeConfig | None:
    scaling = rotary.rope_fields(fields)
    if kind in scaling.raw and scaling.raw[kind] is None:
        return None
    return rotary.rope_of_type(fields, head_dim, rotary.whole_rope(fields, kind, {}))


def model_of(fields: ConfigJson, layers: Sequence[LayerSpec]) -> ModelConfig:
    """A model of these layers, with LayerNorm."""
    norm = NormSpec(fields.number("layer_norm_eps"), NormKind.LAYER, wide=True)
    return reading.dense(fields, layers, norm, logits_scale=fields.number("logit_scale"))


COHERE = Family(
    "Command R and R+, Aya 23 and Aya Expanse",
    ("CohereForCausalLM",),
    _read_1,
    Defaults("CohereConfig"),
    TensorNames(
        names={"attention_norm": "input_layernorm"},
        wrapped=("self_attn.q_norm.weight", "self_attn.k_norm.weight"),
    ),
    nulls=("num_key_value_heads", "use_qk_norm"),
)
COHERE_2 = Family(
    "Command R7B and Command A",
    ("Cohere2ForCausalLM",),
    _read,
    Defaults("Cohere2Config"),
    TensorNames(names={"attention_norm": "input_layernorm"}),
    nulls=("num_key_value_heads",),
)
COMPASS_TEXT = Family(
    "Command Compass (text)",
    ("CohereCompassForCausalLM",),
    _read_compass,
    Defaults("CohereCompassTextConfig"),
    TensorNames(names={"attention_norm": "input_layernorm"}),
    nulls=("logit_scale", "num_key_value_heads"),
)
