"""ERNIE 4.5 VL: two sets of experts, one of them for positions of images.

Tests: tests/core/media/test_image_experts.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from ...config_json import ConfigJson
from ...specs.config import ModelConfig
from ...specs.family import Family
from ...specs.tensor_names import CORRECTION, STACKED_EXPERTS, TEXT_AND_IMAGES
from ...specs.vision import SEES, VisionSpec
from .. import reading, rotary
from ..defaults import Defaults
from ..ernie import NAMES, mixture_of
from .experts import ErnieVlExperts
from .layer import IMAGE_CORRECTION, IMAGE_ROUTER, ErnieVlLayer


def _read(fields: ConfigJson) -> ModelConfig:
    sizes = fields.indices("moe_intermediate_size")
    if len(sizes) != 2 or 0 in sizes:
        raise fields.refuse("moe_intermediate_size", "two sizes of experts are needed: of text, and of images")
    fields = fields.with_values({"moe_intermediate_size": sizes[0]})
    attention = rotary.attention(fields, bias=False, interleaved=True, adjust=_AXES)
    has_experts = reading.mlp_layer_types(fields, 1)
    return mixture_of(fields, has_experts, _NAMES, attention, ErnieVlLayer, kind=ErnieVlExperts, image_size=sizes[1])


_AXES = partial(rotary.in_pairs, default=(22, 22, 20))


_STATICS = "mlp.moe_statics"
_NAMES = replace(
    NAMES,
    prefixes=TEXT_AND_IMAGES.prefixes,
    names={**NAMES.names, IMAGE_ROUTER: "mlp.gate.weight_1"},
    fused={_STATICS: ("mlp.gate", "mlp.image_gate")},
    separate=(_STATICS,),
    wrapped=(CORRECTION, IMAGE_CORRECTION),
    transposed_parts=("mlp.gate.weight", IMAGE_ROUTER),
    stacked_experts={f"mlp.text_moe.{name.removeprefix('mlp.')}": parts for name, parts in STACKED_EXPERTS.items()},
    left_out=(
        *NAMES.left_out,
        "vision_model.",
        "model.vision_model.",
        "model.vision_tower.",
        "model.resampler_model.",
    ),
)

ERNIE_4_5_VL = Family(
    "ERNIE 4.5 VL",
    ("Ernie4_5_VLMoeForConditionalGeneration", "Ernie4_5_VL_MoeForConditionalGeneration"),
    _read,
    Defaults("Ernie4_5_VLMoeTextConfig", {"moe_intermediate_size": [1536, 512]}),
    _NAMES,
    notes=f"{SEES}; images {reading.ON_OPERATORS} alone; the native decoder serves it with images off; models with "
    "biases are refused",
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
