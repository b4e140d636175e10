"""ERNIE 4.5 (text): Llama that rotates neighbouring pairs; ERNIE-4.5-MoE chooses experts by a softmax with a learned
correction. PaddleOCR-VL rotates halves.

Tests: tests/core/model/specs/test_published_configs.py, tests/core/paths
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.feed_forward import Routing
from ..specs.tensor_names import CORRECTION, LLAMA_NORMS, SHARED_EXPERTS, TEXT_AND_IMAGES, TensorNames
from ..specs.vision import SEES
from . import qwen, reading, rotary
from .defaults import Defaults


def _read(fields: ConfigJson) -> ModelConfig:
    return _model(fields, interleaved=True)


def _read_ocr(fields: ConfigJson) -> ModelConfig:
    return _model(fields, adjust=qwen.AXES)


def _model(fields: ConfigJson, **options: Any) -> ModelConfig:
    """options: of `rotary.attention`."""
    bias = fields.boolean("use_bias")
    return reading.decoder(fields, rotary.attention(fields, bias=bias, **options), reading.gated(fields, bias=bias))


def _read_experts(fields: ConfigJson) -> ModelConfig:
    count = fields.integer("num_hidden_layers")
    last = fields.integer("moe_layer_end_index", least=-1)
    first, last = fields.integer("moe_layer_start_index", least=0), count - 1 if last == -1 else last
    interval = fields.integer("moe_layer_interval")
    has_experts = [first <= index <= last and (index + 1) % interval == 0 for index in range(count)]
    return mixture_of(fields, has_experts, NAMES, rotary.attention(fields, bias=False, interleaved=True))


def mixture_of(
    fields: ConfigJson,
    has_experts: Sequence[bool],
    tensors: TensorNames,
    attention: AttentionSpec,
    layer: type[DecoderLayer] = DecoderLayer,
    **options: Any,
) -> ModelConfig:
    """A model of such layers. has_experts: which of them have experts. options: of `reading.experts`."""
    if fields.boolean("use_bias"):
        raise fields.refuse("use_bias", "a shared expert has no biases here; only false is supported")
    if fields.number("moe_norm_min") > _NORM_MIN:
        raise fields.refuse("moe_norm_min", f"weights are divided by their sum, however small; at most {_NORM_MIN}")
    experts = reading.experts(
        fields,
        Routing(1, renormalised=True, corrected=True),
        per_token="num_experts_per_tok" if "num_experts_per_tok" in fields.raw else "moe_k",
        shared="moe_num_shared_experts",
        **options,
    )
    return reading.decoder(fields, attention, experts, has_experts=has_experts, kind=layer, tensors=tensors)


#: The least sum of weights that checkpoints name: sums are above it.
_NORM_MIN = 1e-12

NAMES = TensorNames(
    names={**LLAMA_NORMS, **SHARED_EXPERTS, CORRECTION: "mlp.moe_statics.e_score_correction_bias"},
    wrapped=(CORRECTION,),
    left_out=("model.mtp_",),
)

ERNIE_4_5 = Family(
    "ERNIE 4.5",
    ("Ernie4_5ForCausalLM",),
    _read,
    Defaults("Ernie4_5Config"),
    nulls=("head_dim", "num_key_value_heads", "use_bias"),
)
ERNIE_4_5_MOE = Family(
    "ERNIE-4.5-MoE",
    ("Ernie4_5_MoeForCausalLM",),
    _read_experts,
    Defaults("Ernie4_5_MoeConfig"),
    notes="draft layers (`mtp`) are left out; models with biases are refused",
    nulls=("num_key_value_heads", "use_bias"),
)
PADDLEOCR_VL = Family(
    "PaddleOCR-VL",
    ("PaddleOCRVLForConditionalGeneration",),
    _read_ocr,
    Defaults("PaddleOCRTextConfig"),
    replace(TEXT_AND_IMAGES, left_out=(*TEXT_AND_IMAGES.left_out, "mlp_AR.", "model.projector.")),
    notes=SEES,
    nulls=("head_dim", "num_key_value_heads", "use_bias"),
    vision=replace(
        qwen.VISION,
        token=100295,
        modules=("visual", "projector"),
        copied=(),
        renamed=(("mlp_AR", "projector"),),
    ),
)
