"""Qwen3 with a mixture of experts, in all layers or in some, and Qwen3-VL-MoE."""

from __future__ import annotations

from dataclasses import replace

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.tensor_names import TEXT_AND_IMAGES
from ..specs.vision import SEES
from . import qwen, reading, rotary
from .defaults import UNREAD, Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    window = fields.optional("sliding_window") if fields.boolean("use_sliding_window") else None
    return _model(fields, window, renormalised=fields.boolean("norm_topk_prob"))


def _read_seeing(fields: ConfigJson) -> ModelConfig:
    return _model(fields, None, renormalised=True, has_axes=True)


def _model(fields: ConfigJson, window: int | None, *, renormalised: bool, has_axes: bool = False) -> ModelConfig:
    axes = qwen.QWEN3_AXES if has_axes else None
    attention = rotary.attention(fields, adjust=axes, head_norm=HeadNorm.EACH, window=window)
    experts = reading.experts(fields, Routing(1, renormalised=renormalised))
    return reading.decoder(fields, attention, experts, has_experts=reading.sparse_layers(fields))


QWEN3_MOE = Family(
    "Qwen3-MoE",
    ("Qwen3MoeForCausalLM",),
    _read,
    Defaults("Qwen3MoeConfig", takes=("intermediate_size",)),
)
QWEN3_VL_MOE = Family(
    "Qwen3-VL-MoE",
    ("Qwen3VLMoeForConditionalGeneration",),
    _read_seeing,
    Defaults("Qwen3VLMoeTextConfig", {"tie_word_embeddings": UNREAD}, takes=("intermediate_size",)),
    replace(TEXT_AND_IMAGES, transposed=True, by_shape=True),
    notes=SEES,
    nulls=("head_dim",),
    vision=qwen.QWEN3_VISION,
)
