"""Qwen 2, 2.5 and 3, and Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose positions have axes where images stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType

from ..compose.decoder_layer import DecoderLayer
from ..config_json import ConfigJson
from ..specs.attention import AttentionSpec, HeadNorm
from ..specs.config import ModelConfig
from ..specs.family import Family
from ..specs.rope_config import RopeConfig
from ..specs.tensor_names import TEXT_AND_IMAGES
from ..specs.vision import SEES, VisionSpec
from . import reading, rotary
from .defaults import Defaults


def reader(
    head_norm: HeadNorm | None,
    rope_names: Mapping[str, str] = MappingProxyType({}),
    axes: Callable[[ConfigJson, RopeConfig], RopeConfig] | None = None,
) -> Callable[[ConfigJson], ModelConfig]:
    """head_norm: of Qwen3, whose biases are an option; Qwen2 always has those of q, k and v alone. rope_names: other
    names of types of ropes. axes: gives the rope its axes; None: positions have one.
    """

    def read(fields: ConfigJson) -> ModelConfig:
        heads, count = reading.heads(fields), fields.integer("num_hidden_layers")
        bias = fields.boolean("attention_bias") if head_norm else True
        rope = rotary.rope(fields, heads.head_dim, names=rope_names)
        rope = rope if axes is None else axes(fields, rope)
        layers = [
            DecoderLayer(
                AttentionSpec(
                    *heads,
                    scale=heads.head_dim**-0.5,
                    rope=rope,
                    head_norm=head_norm,
                    qkv_bias=bias,
                    o_bias=bias and head_norm is not None,
                    window=window,
                ),
                reading.gated(fields),
            )
            for window in _windows(fields, count)
        ]
        return reading.dense(fields, layers, reading.rms_norm(fields))

    return read


def _windows(fields: ConfigJson, count: int) -> list[int | None]:
    """The window of each layer."""
    has_windows = fields.states("use_sliding_window", False) and fields.boolean("use_sliding_window")
    window = fields.optional("sliding_window") if has_windows else None
    whole = fields.integer("max_window_layers", None if fields.has("max_window_layers") else count, least=0)
    types = fields.texts("layer_types") and reading.layer_types(fields, 1)
    if window is None and reading.SLIDING in types:
        raise fields.refuse("layer_types", f"{reading.SLIDING} needs use_sliding_window true and a sliding_window")
    types = types or [reading.FULL if index < whole else reading.SLIDING for index in range(count)]
    return [window if seen == reading.SLIDING else None for seen in types]


QWEN2 = Family(
    "Qwen2 and Qwen2.5",
    ("Qwen2ForCausalLM",),
    reader(None),
    Defaults("Qwen2Config"),
    nulls=("num_key_value_heads",),
)
QWEN3 = Family(
    "Qwen3",
    ("Qwen3ForCausalLM",),
    reader(HeadNorm.EACH),
    Defaults("Qwen3Config"),
    nulls=("num_key_value_heads",),
)
AXES = partial(rotary.in_sections, default=(16, 24, 24))
VISION = VisionSpec(
    ("visual",), ("pixel_values", "image_grid_thw"), copied=("merger",), token=151655, grid="image_grid_thw"
)
QWEN2_VL = Family(
    "Qwen2-VL and Qwen2.5-VL",
    ("Qwen2_5_VLForConditionalGeneration", "Qwen2VLForConditionalGeneration"),
    reader(None, {"mrope": "default"}, AXES),
    Defaults("Qwen2_5_VLTextConfig"),
    TEXT_AND_IMAGES,
    notes=SEES,
    nulls=("num_key_value_heads", "use_sliding_window"),
    vision=VISION,
)
QWEN3_AXES = partial(rotary.in_turns, default=(24, 20, 20))
QWEN3_VISION = replace(VISION, copied=("merger", "deepstack_merger_list"), additions=(8, 16, 24))
QWEN3_VL = Family(
    "Qwen3-VL",
    ("Qwen3VLForConditionalGeneration",),
    reader(HeadNorm.EACH, axes=QWEN3_AXES),
    Defaults("Qwen3VLTextConfig"),
    TEXT_AND_IMAGES,
    notes=SEES,
    nulls=("num_key_value_heads",),
    vision=QWEN3_VISION,
)
