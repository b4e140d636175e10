"""ERNIE 4.5 (text): Llama that rotates neighbouring pairs; ERNIE-4.5-MoE chooses experts by a softmax with a learned
correction. PaddleOCR-VL rotates halves. ERNIE 4.5 VL has two sets of experts, one of them for positions of images.

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
from ..specs.tensor_names import (
    CORRECTION,
    IMAGE_CORRECTION,
    IMAGE_ROUTER,
    LLAMA_NORMS,
    STACKED_EXPERTS,
    TEXT_AND_IMAGES,
    TensorNames,
)
from ..specs.vision import SEES, VisionSpec
from . import qwen, reading, rotary
from .defaults import Defaults


def _attention(fields: ConfigJson, *, bias: bool, interleaved: bool = True) -> AttentionSpec:
    heads = reading.heads(fields)
    rope = rotary.rope(fields, heads.head_dim, interleaved=interleaved)
    return AttentionSpec(*heads, scale=heads.head_dim**-0.5, rope=rope, qkv_bias=bias, o_bias=bias)


def _read(fields: ConfigJson) -> ModelConfig:
    return _model(fields, _attention(fields, bias=fields.boolean("use_bias")))


def _read_ocr(fields: ConfigJson) -> ModelConfig:
    attention = _attention(fields, bias=fields.boolean("use_bias"), interleaved=False)
    assert attention.rope is not None, "all layers rotate"
    return _model(fields, replace(attention, rope=qwen.AXES(fields, attention.rope)))


def _model(fields: ConfigJson, attention: AttentionSpec) -> ModelConfig:
    layer = DecoderLayer(attention, reading.gated(fields, bias=fields.boolean("use_bias")))
    return reading.dense(fields, [layer] * fields.integer("num_hidden_layers"), reading.rms_norm(fields))


def _read_experts(fields: ConfigJson) -> ModelConfig:
    count = fields.integer("num_hidden_layers")
    last = fields.integer("moe_layer_end_index", least=-1)
    first, last = fields.integer("moe_layer_start_index", least=0), count - 1 if last == -1 else last
    interval = fields.integer("moe_layer_interval")
    has_experts = [first <= index <= last and (index + 1) % interval == 0 for index in range(count)]
    return _mixture(fields, _attention(fields, bias=False), has_experts, _EXPERTS)


def _read_seeing(fields: ConfigJson) -> ModelConfig:
    sizes = fields.indices("moe_intermediate_size")
    if len(sizes) != 2 or 0 in sizes:
        raise fields.refuse("moe_intermediate_size", "two sizes of experts are needed: of text, and of images")
    fields = fields.with_values({"moe_intermediate_size": sizes[0]})
    attention = _attention(fields, bias=False)
    assert attention.rope is not None, "all layers rotate"
    attention = replace(attention, rope=rotary.in_pairs(fields, attention.rope, (22, 22, 20)))
    has_experts = reading.mlp_layer_types(fields, 1)
    return _mixture(fields, attention, has_experts, _IMAGE_EXPERTS, image_size=sizes[1])


def _mixture(
    fields: ConfigJson, attention: AttentionSpec, has_experts: Sequence[bool], tensors: TensorNames, **options: Any
) -> ModelConfig:
    """has_experts: which layers have. options: of `Experts`."""
    if fields.boolean("use_bias"):
        raise fields.refuse("use_bias", "a shared expert has no biases here; only false is supported")
    if fields.number("moe_norm_min") > _NORM_MIN:
        raise fields.refuse("moe_norm_min", f"weights are divided by their sum, however small; at most {_NORM_MIN}")
    experts = reading.experts(
        fields,
        Routing(1, renormalised=True, corrected=True),
        per_token="num_experts_per_tok" if "num_experts_per_tok" in fields.raw else "moe_k",
        shared_size=reading.number_of(fields, "moe_num_shared_experts") * fields.integer("moe_intermediate_size"),
        **options,
    )
    layers = reading.layers_with_experts(fields, [attention] * len(has_experts), experts, has_experts)
    return reading.dense(fields, layers, reading.rms_norm(fields), tensors=tensors)


#: The least sum of weights that checkpoints name: sums are above it.
_NORM_MIN = 1e-12

_MATRICES = ("gate_proj", "up_proj", "down_proj")
_EXPERTS = TensorNames(
    names={
        **LLAMA_NORMS,
        **{f"mlp.shared_expert.{each}": f"mlp.shared_experts.{each}" for each in _MATRICES},
        CORRECTION: "mlp.moe_statics.e_score_correction_bias",
    },
    wrapped=(CORRECTION,),
    left_out=("model.mtp_",),
)
_STATICS = "mlp.moe_statics"
_IMAGE_EXPERTS = replace(
    _EXPERTS,
    prefixes=TEXT_AND_IMAGES.prefixes,
    names={**_EXPERTS.names, IMAGE_ROUTER: "mlp.gate.weight_1"},
    fused={_STATICS: ("mlp.gate", "mlp.image_gate")},
    apart=(_STATICS,),
    wrapped=(CORRECTION, IMAGE_CORRECTION),
    transposed_parts=("mlp.gate.weight", IMAGE_ROUTER),
    stacked_experts={f"mlp.text_moe.{name.removeprefix('mlp.')}": parts for name, parts in STACKED_EXPERTS.items()},
    left_out=(
        *_EXPERTS.left_out,
        "vision_model.",
        "model.vision_model.",
        "model.vision_tower.",
        "model.resampler_model.",
    ),
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
ERNIE_4_5_VL = Family(
    "ERNIE 4.5 VL",
    ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration"),
    _read_seeing,
    Defaults("Ernie4_5_VLMoeTextConfig", {"moe_intermediate_size": [1536, 512]}),
    _IMAGE_EXPERTS,
    notes=f"{SEES}; images on CPUs alone; the native decoder serves it with images off; models with biases are refused",
    nulls=("head_dim", "num_key_value_heads", "use_bias"),
    vision=VisionSpec(
        ("vision_tower", "resampler_model"),
        ("pixel_values", "image_grid_thw"),
        copied=("spatial_linear", "temporal_linear"),
        token=100295,
        grid="image_grid_thw",
        ends=(101304, 101305),
        renamed=(("vision_model", "vision_tower"),),
    ),
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
