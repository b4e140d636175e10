"""OLMoE: a mixture of experts, and one norm over all heads of queries and of keys. FlexOlmo norms after each part."""

from __future__ import annotations

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.norms import Norms
from ..specs.tensor_names import AFTER_NORMS, TensorNames
from . import reading, rotary


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
    layers = [DecoderLayer(attention, experts, norms)] * fields.integer("num_hidden_layers")
    return reading.dense(fields, layers, reading.rms_norm(fields, wide=norms is Norms.AFTER))


OLMOE = Family(
    "OLMoE",
    ("OlmoeForCausalLM",),
    _read,
    {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "intermediate_size": 2048,
        "num_experts": 64,
        "num_experts_per_tok": 8,
    },
)
FLEX_OLMO = Family(
    "FlexOlmo",
    ("FlexOlmoForCausalLM",),
    _read_flex,
    {
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "intermediate_size": 11008,
        "num_experts": 7,
        "num_experts_per_tok": 5,
        "rope_theta": 500000.0,
    },
    TensorNames(names=AFTER_NORMS),
    nulls=("num_key_value_heads",),
)
