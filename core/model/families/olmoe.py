"""OLMoE: a mixture of experts, and one norm over all heads of queries and of keys. FlexOlmo norms after each part."""

from __future__ import annotations

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.norms import Norms
from ..specs.tensor_names import AFTER_NORMS, TensorNames
from . import reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    if fields.has("clip_qkv"):
        raise fields.refuse("clip_qkv", "queries, keys and values are not clipped; only null is supported")
    return _model(fields, Norms.BEFORE)


def _read_flex(fields: ConfigJson) -> ModelConfig:
    return _model(fields, Norms.AFTER)


def _model(fields: ConfigJson, norms: Norms) -> ModelConfig:
    attention = rotary.attention(fields, head_norm=HeadNorm.ALL)
    routing = Routing(1, renormalised=fields.boolean("norm_topk_prob"))
    experts = reading.experts(fields, routing, size="intermediate_size")
    norm = reading.rms_norm(fields, wide=norms is Norms.AFTER)
    return reading.decoder(fields, attention, experts, norm, norms=norms)


OLMOE = Family(
    "OLMoE",
    ("OlmoeForCausalLM",),
    _read,
    Defaults("OlmoeConfig", takes=("intermediate_size",)),
)
FLEX_OLMO = Family(
    "FlexOlmo",
    ("FlexOlmoForCausalLM",),
    _read_flex,
    Defaults("FlexOlmoConfig", takes=("intermediate_size",)),
    TensorNames(names=AFTER_NORMS),
    nulls=("num_key_value_heads",),
)
