"""A layer's weights, rotary tables and page locations, from which the native decoder's ops get their arguments.

Tests: tests/core/model/program/test_native_decoder.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....memory.pages.layout import PageGroup, PageLayout
from ....ops.elementwise.elementwise import rotary_table, rows_of_axes
from ....ops.elementwise.float8_kv import UNSCALED, KvScales
from ....ops.library.native_model import LayerMixture
from ....ops.library.native_program import NativeOp
from ..batch import AxisPositions
from ..specs.attention import AttentionSpec, LogScaling
from ..specs.layers import LayerSpec, kv_index, ropes_of
from ..specs.rope_config import RopeConfig
from ..weights.layer_weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Tables:
    """Tables by position, which layers with the same rope or log-n scaling share."""

    positions: int
    angles: Mapping[RopeConfig, tuple[torch.Tensor, torch.Tensor]]
    """Cosines and sines `[positions + spare, rotary_dim]` float32: of each rotated element, times the attention factor.
    """

    log_scalings: Mapping[LogScaling, torch.Tensor]
    """Factors of queries, `[positions]` float32."""

    spare: int = 0
    """Rows behind those of positions, for tokens of a step whose positions differ between axes."""

    @classmethod
    def of(
        cls, layers: Sequence[LayerSpec], positions: int, spare: int = 0, factors: torch.Tensor | None = None
    ) -> Tables:
        """Those that the layers need. factors: learned ones of frequencies; see `RopeConfig.is_learned`."""
        mixers = [layer.attention for layer in layers if layer.attention is not None]
        scalings = dict.fromkeys(mixer.log_scaling for mixer in mixers if mixer.log_scaling is not None)
        return cls(
            positions,
            {rope: _angles(rope, positions, spare, factors) for rope in ropes_of(layers)},
            {scaling: scaling.factors(positions) for scaling in scalings},
            spare,
        )

    def by_axes(self, positions: torch.Tensor, axes: AxisPositions) -> torch.Tensor:
        """A step's rows of these tables, `[tokens]` int64; those of tokens whose positions differ between axes are made
        here, and hold until the next step. positions: of all tokens, of which those are overwritten.
        """
        count = len(axes.places)
        if count > self.spare or self.log_scalings:
            raise RuntimeError(f"{count} tokens of a step have positions on axes, there is room for {self.spare}")
        for rope, tables in self.angles.items():
            element_axes = torch.tensor(rope.element_axes)
            for table in tables:
                table[self.positions : self.positions + count] = rows_of_axes(table, element_axes, axes.positions)
        made = torch.arange(self.positions, self.positions + count)
        return positions.index_copy(0, axes.places, made)


def _angles(
    rope: RopeConfig, positions: int, spare: int, factors: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    own = {"factor": rope.attention_factor, "interleaved": rope.interleaved}
    angles = rope.angles(positions)
    angles = angles if factors is None or not rope.is_learned else angles * factors
    return rotary_table(angles, positions + spare, **own)


@dataclass(slots=True)
class LayerBinding:
    """A layer: what its ops' arguments are made of."""

    weights: LayerWeights
    tables: Tables
    page_group: int = 0
    """The page group whose pages have its keys and values."""

    page_layer: int = 0
    """Its place among the layers in these pages."""

    plane: int = 0
    """Elements from a page's beginning to its latents."""

    kv_scales: KvScales = UNSCALED
    state_layer: int = 0
    """Its place among layers with a recurrent mixer."""

    mixture: LayerMixture | None = None


#: An argument that is known only when an op is described.
Late = Callable[[LayerBinding], Any]


def weight_of(slot: str) -> Late:
    """A weight of the layer: packed if it is a matrix, else float32; None if it has none."""
    return lambda at: at.weights.get(slot)


def number_of(slot: str) -> Late:
    """A weight of one element."""
    weight = weight_of(slot)
    return lambda at: float(weight(at))


def filled(op: NativeOp, at: LayerBinding) -> NativeOp:
    """An op with what its layer has in place of `Late` arguments."""
    return NativeOp(op.kind, _filled(op.arguments, at))


def _filled(arguments: Mapping[str, Any], at: LayerBinding) -> dict[str, Any]:
    return {
        name: each(at) if callable(each) else _filled(each, at) if isinstance(each, Mapping) else each
        for name, each in arguments.items()
    }


def layer_bindings(
    layers: Sequence[LayerSpec],
    weights: Sequence[LayerWeights],
    tables: Tables,
    layout: PageLayout | None = None,
    kv_scales: Sequence[KvScales] = (),
    mixtures: Sequence[LayerMixture | None] = (),
    planes: Sequence[int] = (),
) -> list[LayerBinding]:
    """The layers' bindings. layout: where their KV is; by default all layers' in each page. kv_scales: of each layer's
    KV; none: it is not in FP8. mixtures: by layer; empty: no layer has any. planes: of each layer's KV, elements from a
    page's beginning; needed for latents.
    """
    kv_of, with_state = kv_index(layers), 0
    groups = (PageGroup(tuple(range(len(layers)))),) if layout is None else layout.groups
    pages = {layer: (group, at) for group, each in enumerate(groups) for at, layer in enumerate(each.layers)}
    found: list[LayerBinding] = []
    for index, (layer, own) in enumerate(zip(layers, weights, strict=True)):
        binding = LayerBinding(own, tables, state_layer=with_state, mixture=mixtures[index] if mixtures else None)
        if layer.attention is not None:
            binding.page_group, binding.page_layer = pages[kv_of[index]]
            binding.kv_scales = kv_scales[kv_of[index]] if kv_scales else UNSCALED
            binding.plane = planes[kv_of[index]] if planes else 0
        found.append(binding)
        with_state += layer.recurrent is not None
    return found


def score_scale(mixer: AttentionSpec) -> float:
    """The usual scale as float32 arithmetic gives it, which for some head sizes is not head_dim^-0.5 rounded."""
    if mixer.scale == mixer.head_dim**-0.5:
        return float(1 / np.sqrt(np.float32(mixer.head_dim)))
    return mixer.scale
