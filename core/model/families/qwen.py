"""Qwen 2, 2.5 and 3, and Qwen2-VL, Qwen2.5-VL and Qwen3-VL, whose positions have axes where images stand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

from ..config_json import ConfigJson
from ..specs.attention import HeadNorm
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
        bias: dict[str, Any] = {} if head_norm else {"qkv_bias": True}
        rope = rotary.rope(fields, reading.heads(fields).head_dim, names=rope_names)
        rope = rope if axes is None else axes(fields, rope)
        attention = rotary.attention(fields, rope=rope, head_norm=head_norm, **bias)
        windows = _windows(fields, fields.integer("num_hidden_layers"))
        return reading.decoder(fields, [replace(attention, window=each) for each in windows], reading.gated(fields))

    return read


def _windows(fields: ConfigJson, count: int) -> list[int | None]:
    """The window of each layer."""
    has_windows = fields.states("use_sliding_window", False) and fields.boolean("use_sliding_window")
    window = fields.optional("sliding_window") if has_windows else None
    whole = fields.integer("max_window_layers", None if fields.has("max_window_layers") else count, least=0)
    return windows_of(fields, window, [reading.FULL if at < whole else reading.SLIDING for at in range(count)])


def windows_of(fields: ConfigJson, window: int | None, default: Sequence[str]) -> list[int | None]:
    """The window of each layer, where all of them may have none. default: types where `layer_types` is missing."""
    types = reading.layer_types(fields, default)
    if window is None and reading.SLIDING in types and not fields.is_missing("layer_types"):
        raise fields.refuse("layer_types", f"{reading.SLIDING} needs use_sliding_window true and a sliding_window")
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
