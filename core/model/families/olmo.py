"""OLMo 2 and OLMo 3: norms after each part, and one norm over all heads of queries and of keys. OLMo 1 has LayerNorm
without weights.
"""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.norms import NormKind, Norms, NormSpec
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import AFTER_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _model(fields: ConfigJson, types: list[str], ropes: dict[str, RopeConfig]) -> ModelConfig:
    """types: of layers, each with its rope."""
    attention = rotary.attention(fields, rope=None, head_norm=HeadNorm.ALL)
    mixers, norm = rotary.of_types(fields, attention, types, ropes), reading.rms_norm(fields, wide=True)
    return reading.decoder(fields, mixers, reading.gated(fields), norm, norms=Norms.AFTER)


def _read_1(fields: ConfigJson) -> ModelConfig:
    attention = rotary.attention(fields, clip=reading.optional_number(fields, "clip_qkv"))
    norm = NormSpec(1e-5, NormKind.LAYER, wide=True, weightless=True)
    return reading.decoder(fields, attention, reading.gated(fields), norm)


def _read_2(fields: ConfigJson) -> ModelConfig:
    rope = rotary.rope(fields, reading.heads(fields).head_dim)
    return _model(fields, [reading.FULL] * fields.integer("num_hidden_layers"), {reading.FULL: rope})


def _read_3(fields: ConfigJson) -> ModelConfig:
    ropes = rotary.ropes_by_type(fields, {reading.FULL: ("rope_theta", _THETA), reading.SLIDING: (None, _THETA)})
    return _model(fields, reading.layer_types(fields, 4), ropes)


_THETA = 500000.0
_NAMES = TensorNames(names=AFTER_NORMS)

OLMO_1 = Family(
    "OLMo 1",
    ("OlmoForCausalLM",),
    _read_1,
    Defaults("OlmoConfig"),
)
OLMO_2 = Family(
    "OLMo 2",
    ("Olmo2ForCausalLM",),
    _read_2,
    Defaults("Olmo2Config"),
    _NAMES,
    nulls=("num_key_value_heads",),
)
OLMO_3 = Family(
    "OLMo 3",
    ("Olmo3ForCausalLM",),
    _read_3,
    Defaults("Olmo3Config"),
    _NAMES,
    nulls=("num_key_value_heads",),
)
