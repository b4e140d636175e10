"""Command R and R+ (Cohere), and Command R7B and Command A (Cohere 2): attention and feed-forward side by side,
LayerNorm, and a scale of the logits. Cohere 2 has no rope in layers without a window.

Command Compass has a rope for each type of layers.

Tests: tests/core/test_families.py, tests/core/test_experts.py
"""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import NormKind, Norms, NormSpec
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields, interleaved=True)
    pattern = fields.integer("sliding_window_pattern", None if fields.has("sliding_window_pattern") else 4)
    ropes = {reading.FULL: None, reading.SLIDING: attention.rope}
    mixers = rotary.of_types(fields, attention, reading.layer_types(fields, pattern), ropes)
    return _model(fields, mixers, fields.number("logit_scale"))


def _read_1(fields: ConfigJson) -> ModelConfig:
    head_norm = HeadNorm.OWN if fields.boolean("use_qk_norm") else None
    attention = rotary.attention(fields, interleaved=True, head_norm=head_norm)
    return _model(fields, attention, fields.number("logit_scale"))


def _read_compass(fields: ConfigJson) -> ModelConfig:
    """Layers of each type have a rope of their own, which turns halves; null: they have none."""
    attention = rotary.attention(fields.without("head_dim"), rope=None)
    if not fields.is_missing("head_dim") and fields.integer("head_dim") != attention.head_dim:
        raise fields.refuse("head_dim", f"only hidden_size / num_attention_heads is supported: {attention.head_dim}")
    types = reading.layer_types(fields)
    ropes = {kind: _rope_of_type(fields, kind, attention.head_dim) for kind in dict.fromkeys(types)}
    mixers = rotary.of_types(fields, attention, types, ropes)
    return _model(fields, mixers, reading.optional_number(fields, "logit_scale") or 1.0)


def _rope_of_type(fields: ConfigJson, kind: str, head_dim: int) -> RopeConfig | None:
    scaling = rotary.rope_fields(fields)
    if kind in scaling.raw and scaling.raw[kind] is None:
        return None
    return rotary.rope_of_type(fields, head_dim, rotary.whole_rope(fields, kind, {}))


def _model(fields: ConfigJson, mixer: AttentionSpec | list[AttentionSpec], logits_scale: float) -> ModelConfig:
    feed_forward, norms = reading.gated(fields), Norms.PARALLEL
    return reading.decoder(fields, mixer, feed_forward, norm_of(fields), norms=norms, logits_scale=logits_scale)


def norm_of(fields: ConfigJson) -> NormSpec:
    """LayerNorm without a bias."""
    return NormSpec(fields.number("layer_norm_eps"), NormKind.LAYER, wide=True)


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
