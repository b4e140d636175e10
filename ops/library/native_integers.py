"""Weights that are small whole numbers, in the panels that the native library multiplies.

Tests: tests/ops/library/test_native_integers.py
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Array
from dataclasses import dataclass
from typing import Any

import torch

from .native_library import native_layout
from .native_model import PANEL

BITS = (4, 8)
"""Bits of a weight that the library multiplies."""

BLOCK = 256
"""The largest block of activations of 16 bits: a sum of its products has 31 bits."""

MULTIPLE = 8
"""A group's inputs must be a multiple of it."""

#: Inputs of a word by the byte that holds them: of four bits, in the byte's lower and upper half.
_BYTES = {8: ((0, 2, 1, 3),), 4: ((0, 4, 1, 5), (2, 6, 3, 7))}


@dataclass(frozen=True, slots=True)
class IntegerPanels:
    """A projection's weights as whole numbers with scales, in panels of 32 outputs: see `native/integers.h`."""

    data: torch.Tensor
    """`[panels, words, 32, 4]` uint8."""

    scales: torch.Tensor
    """`[panels, groups, 32]` float32."""

    zeros: torch.Tensor | None
    """`[panels, groups, 32]` bfloat16; None: all are 0."""

    bits: int
    group: int
    """Inputs that share a scale."""

    outputs: int
    inputs: int

    input_bits: int = 16
    """Bits of an activation as it is multiplied: 8, or 16 (in float32 models 31)."""

    input_block: int = BLOCK
    """Inputs of a row of activations that share a factor, at most: a multiple of 8 that is also within a group."""

    @property
    def nbytes(self) -> int:
        """Bytes that the weights take."""
        return sum(each.nbytes for each in (self.data, self.scales, self.zeros) if each is not None)


def is_packed(inputs: int, bits: int, group: int) -> bool:
    """True if a projection with rows of `inputs` in groups of `group` can be packed, in the next of `BITS`."""
    return bits <= max(BITS) and (group >= inputs or not group % MULTIPLE)


def integer_sizes(outputs: int, inputs: int, bits: int, group: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of a projection's `IntegerPanels.data` and `IntegerPanels.scales`. Raises ValueError if it can't be
    packed.
    """
    if bits not in BITS:
        raise ValueError(f"weights of {bits} bits can't be packed; {' or '.join(map(str, BITS))} bits can")
    if group < 1 or (group < inputs and group % MULTIPLE):
        raise ValueError(f"groups of {group} inputs can't be packed; their size must be a multiple of {MULTIPLE}")
    panels, eights = -(-outputs // PANEL), -(-inputs // 8)
    return (panels, eights * bits // 4, PANEL, 4), (panels, -(-inputs // group), PANEL)


def pack_integers(
    integers: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    group: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
    input_bits: int = 16,
    input_block: int = BLOCK,
) -> IntegerPanels:
    """Pack weights `(integers - zeros) · scales`.

    integers: `[out, in]` int8 from -2^(bits-1) to 2^(bits-1) - 1. scales, zeros: `[out, groups]`. out: optional memory
    for data and scales, of `integer_sizes`. input_bits, input_block: see `IntegerPanels`.
    """
    rows, inputs = integers.shape
    group = -(-inputs // MULTIPLE) * MULTIPLE if group >= inputs else group
    shape, scales_shape = integer_sizes(rows, inputs, bits, group)
    data, packed_scales = out or (torch.empty(shape, dtype=torch.uint8), torch.empty(scales_shape))
    panels, words = shape[:2]
    stored = torch.zeros(panels * PANEL, words * 32 // bits, dtype=torch.uint8)
    stored[:rows, :inputs] = integers.view(torch.uint8) + (1 << (bits - 1)) & (1 << bits) - 1
    by_word = stored.view(panels, PANEL, words, 32 // bits).transpose(1, 2)
    low, *high = (by_word[..., list(inputs)] for inputs in _BYTES[bits])
    data.copy_(low | high[0] << 4 if high else low)
    packed_scales.copy_(_by_panel(scales.float(), panels))
    packed_zeros = None if zeros is None else _by_panel(zeros.to(torch.bfloat16), panels).contiguous()
    return IntegerPanels(
        data, packed_scales, packed_zeros, bits=bits, group=group, outputs=rows, inputs=inputs,
        input_bits=input_bits, input_block=input_block,
    )  # fmt: skip


def unpack_integers(weight: IntegerPanels) -> torch.Tensor:
    """Return the weights `[out, in]` that panels hold, in float32."""
    bits, words = weight.bits, weight.data.shape[1]
    by_word = torch.empty(*weight.data.shape[:3], 32 // bits, dtype=torch.uint8)
    for place, inputs in enumerate(_BYTES[bits]):
        by_word[..., list(inputs)] = weight.data >> (place * bits) & (1 << bits) - 1
    stored = by_word.transpose(1, 2).reshape(-1, words * 32 // bits)[: weight.outputs, : weight.inputs]
    values = stored.float() - (1 << (bits - 1))
    group_of = torch.arange(weight.inputs) // weight.group

    def of_inputs(each: torch.Tensor) -> torch.Tensor:
        return each.transpose(1, 2).reshape(-1, each.shape[1])[: weight.outputs, group_of]

    if weight.zeros is not None:
        values -= of_inputs(weight.zeros)
    return values * of_inputs(weight.scales)


def described_integers(weight: object) -> dict[str, Any]:
    """The library's `Integers` of a matrix: how it is whole numbers; empty where it is of a model's dtype."""
    if not isinstance(weight, IntegerPanels):
        return {}
    return {
        "scales": weight.scales.data_ptr(),
        "zeros": None if weight.zeros is None else weight.zeros.data_ptr(),
        "bits": weight.bits,
        "group": weight.group,
        "input_bits": weight.input_bits,
        "input_block": weight.input_block,
    }


def integers_of_each(matrices: Sequence[object]) -> Array[Any] | None:
    """The library's `Integers` of matrices; None if none of them is whole numbers."""
    if not any(isinstance(each, IntegerPanels) for each in matrices):
        return None
    return native_layout().array("Integers", [described_integers(each) for each in matrices])


def _by_panel(values: torch.Tensor, panels: int) -> torch.Tensor:
    """`[out, groups]` as `[panels, groups, 32]`, with zeros for outputs that there are none of."""
    rows, groups = values.shape
    padded = torch.zeros(panels * PANEL, groups, dtype=values.dtype)
    padded[:rows] = values
    return padded.view(panels, PANEL, groups).transpose(1, 2)
