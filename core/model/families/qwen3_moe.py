"""Qwen3 with a mixture of experts, in all layers or in some, and Qwen3-VL-MoE."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family, text_shape
from ..specs.feed_forward import Routing
from ..specs.tensor_names import TEXT_AND_IMAGES
from ..specs.vision import SEES
from . import qwen, reading, rotary


def _read(fields: ConfigJson) -> ModelConfig:
    window = fields.optional("sliding_window") if fields.boolean("use_sliding_window") else None
    return _model(fields, window, renormalised=fields.boolean("norm_topk_prob"))


def _read_seeing(fields: ConfigJson) -> ModelConfig:
    return _model(fields, None, renormalised=True, has_axes=True)


def _model(fields: ConfigJson, window: int | None, *, renormalised: bool, has_axes: bool = False) -> ModelConfig:
    count = fields.integer("num_hidden_layers")
    attention = rotary.attention(fields, head_norm=HeadNorm.EACH, window=window)
    if has_axes and attention.rope is not None:
        attention = replace(attention, rope=qwen.QWEN3_AXES(fields, attention.rope))
    experts = reading.experts(fields, Routing(1, renormalised=renormalised))
    step, dense = fields.integer("decoder_sparse_step"), set(fields.indices("mlp_only_layers"))
    has_experts = [index not in dense and (index + 1) % step == 0 for index in range(count)]
    layers = reading.layers_with_experts(fields, [attention] * count, experts, has_experts)
    return reading.dense(fields, layers, reading.rms_norm(fields))


QWEN3_MOE = Family(
    "Qwen3-MoE",
    ("Qwen3MoeForCausalLM",),
    _read,
    {
        "num_key_value_heads": 4,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "decoder_sparse_step": 1,
    },
    shape=text_shape(151936, 2048, 6144, 24, 32),
)
QWEN3_VL_MOE = Family(
    "Qwen3-VL-MoE",
    ("Qwen3VLMoeForConditionalGeneration",),
    _read_seeing,
    {
        "num_key_value_heads": 16,
        "max_position_embeddings": 128000,
        "rope_theta": 500000.0,
        "intermediate_size": 5632,
        "moe_intermediate_size": 1408,
        "num_experts": 60,
        "num_experts_per_tok": 4,
        "decoder_sparse_step": 1,
    },
    replace(TEXT_AND_IMAGES, transposed=True, by_shape=True),
    notes=SEES,
    nulls=("head_dim",),
    shape=text_shape(151936, 2048, 5632, 24, 16),
    vision=qwen.QWEN3_VISION,
)
