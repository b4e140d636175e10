"""Command R and R+ (Cohere), and Command R7B and Command A (Cohere 2): attention and feed-forward side by side,
LayerNorm, and a scale of the logits. Cohere 2 has no rope in layers without a window.

Cohere 2 MoE has a mixture of experts, in all layers but the first ones. Command Compass has a rope for each type of
layers.

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
from ..specs.feed_forward import Routing, Scoring
from ..specs.layers import LayerSpec
from ..specs.norms import NormKind, Norms, NormSpec
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import TensorNames
from . import glm_moe, reading, rotary
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
    return _model(fields, layers)


def _read_experts(fields: ConfigJson) -> ModelConfig:
    heads, bias = reading.heads(fields), fields.boolean("attention_bias")
    if fields.raw.get("rope_scaling"):
        raise fields.refuse("rope_scaling", "transformers leaves it out for this family; set rope_parameters")
    if not fields.raw.get("rope_parameters", True):
        raise fields.refuse(
            "rope_parameters", "an object with rope_type is needed; leave the field out for its default"
        )
    rotary.check_original(rotary.rope_fields(fields))
    rope = rotary.rope(fields, heads.head_dim, interleaved=True)
    count, size = fields.integer("num_hidden_layers"), fields.integer("intermediate_size")
    first = reading.number_of(fields, "first_k_dense_replace")
    of_first = fields.integer("prefix_dense_sliding_window_pattern")
    has_experts = reading.mlp_layer_types(fields, first)
    patterns = [(of_first, range(first)), (fields.integer("sliding_window_pattern"), range(max(0, count - first)))]
    types = [
        reading.SLIDING if (index + 1) % pattern else reading.FULL for pattern, some in patterns for index in some
    ][:count]
    types = reading.layer_types(fields, 1) if fields.texts("layer_types") else types
    window = reading.checked_window(fields, types)
    experts = reading.experts(
        fields,
        _routing(fields),
        size="intermediate_size",
        shared_size=reading.number_of(fields, "num_shared_experts") * size,
        factor=_shared_factor(fields),
    )
    plain = experts if all(has_experts) else reading.gated(fields, size="prefix_dense_intermediate_size")
    layers = [
        DecoderLayer(
            AttentionSpec(
                *heads,
                scale=heads.head_dim**-0.5,
                rope=rope if (kind == reading.SLIDING and window) or (not is_sparse and of_first == 1) else None,
                window=window if kind == reading.SLIDING else None,
                qkv_bias=bias,
                o_bias=bias,
            ),
            experts if is_sparse else plain,
            Norms.PARALLEL,
        )
        for kind, is_sparse in zip(types, has_experts, strict=True)
    ]
    if (eps := reading.optional_number(fields, "rms_norm_eps")) is None:
        return _model(fields, layers)
    return reading.dense(fields, layers, NormSpec(eps), logits_scale=fields.number("logit_scale"))


def _routing(fields: ConfigJson) -> Routing:
    if (name := fields.text("expert_selection_fn")) not in ("softmax", "sigmoid"):
        raise fields.refuse("expert_selection_fn", "not supported; supported: softmax, sigmoid")
    if name == "softmax":
        return Routing(1, Scoring.SOFTMAX_OF_CHOSEN)
    return Routing(1, Scoring.SIGMOID, renormalised=fields.boolean("norm_topk_prob"))


def _shared_factor(fields: ConfigJson) -> float:
    """Of the sum of the routed experts' output and the shared ones'."""
    strategy = fields.text("shared_expert_combination_strategy")
    if strategy not in ("average", "sum"):
        raise fields.refuse("shared_expert_combination_strategy", "not supported; supported: average, sum")
    return 0.5 if strategy == "average" and reading.number_of(fields, "num_shared_experts") else 1.0


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
    return _model(fields, layers)


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


def _model(fields: ConfigJson, layers: Sequence[LayerSpec]) -> ModelConfig:
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
COHERE_2_MOE = Family(
    "Cohere 2 MoE",
    ("Cohere2MoeForCausalLM",),
    _read_experts,
    Defaults("Cohere2MoeConfig", takes=("intermediate_size",)),
    TensorNames(
        names={
            **{name: given for name, given in glm_moe.NAMES.items() if name.startswith("mlp.")},
            "attention_norm": "input_layernorm",
        }
    ),
    nulls=("num_key_value_heads", "rms_norm_eps"),
)
COMPASS_TEXT = Family(
    "Command Compass (text)",
    ("CohereCompassForCausalLM",),
    _read_compass,
    Defaults("CohereCompassTextConfig"),
    TensorNames(names={"attention_norm": "input_layernorm"}),
    nulls=("logit_scale", "num_key_value_heads"),
)
