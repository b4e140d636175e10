"""Parts of quantised matrices, and matrices one below the other, without a change of any weight.

Tests: tests/core/model/checkpoints/quantization/test_groups.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from .....ops.library.native_integers import BITS, IntegerPanels, integer_sizes, is_packed, pack_integers
from .format import Narrow
from .group_scaled import SIGNED_BITS, GroupScaled
from .rounded_inputs import Float8Inputs, RoundedInputs


def part_of(matrix: GroupScaled, rows: slice | torch.Tensor, columns: slice) -> GroupScaled:
    """Some rows and columns of a matrix."""
    group_of = matrix.group_of[columns]
    kept, group_of = group_of.unique(return_inverse=True)
    zeros = None if matrix.zeros is None else matrix.zeros[rows][:, kept]
    values, scales = matrix.values[rows, columns], matrix.scales[rows][:, kept]
    return replace(matrix, values=values, scales=scales, zeros=zeros, group_of=group_of)


def stacked(matrices: Sequence[GroupScaled]) -> GroupScaled:
    """Matrices with the same inputs and bits, one below the other.

    Activations are rounded if they are for all of them, in the same way.
    """
    first = matrices[0]
    if len(matrices) == 1:
        return first
    if len(bits := {matrix.bits for matrix in matrices}) > 1:
        raise ValueError(f"matrices of {' and '.join(map(str, sorted(bits)))} bits can't be stacked")
    if any(not torch.equal(matrix.group_of, first.group_of) for matrix in matrices):
        groups = torch.stack([matrix.group_of for matrix in matrices])
        _, group_of = groups.unique(dim=1, return_inverse=True)
        matrices = [_with_groups(matrix, group_of) for matrix in matrices]
    values, scales = torch.cat([it.values for it in matrices]), torch.cat([it.scales * it.factor for it in matrices])
    has_zeros = any(matrix.zeros is not None for matrix in matrices)
    zeros = torch.cat([_zeros_of(matrix) for matrix in matrices]) if has_zeros else None
    return GroupScaled(
        values,
        first.bits,
        scales,
        zeros,
        matrices[0].group_of,
        inputs=_common_inputs(matrices),
        mxfp4=all(matrix.mxfp4 for matrix in matrices),
    )


def _common_inputs(matrices: Sequence[GroupScaled]) -> RoundedInputs | Float8Inputs | None:
    inputs = {matrix.inputs for matrix in matrices}
    return inputs.pop() if len(inputs) == 1 else None


def _zeros_of(matrix: GroupScaled) -> torch.Tensor:
    return torch.zeros_like(matrix.scales, dtype=torch.int16) if matrix.zeros is None else matrix.zeros


def _with_groups(matrix: GroupScaled, group_of: torch.Tensor) -> GroupScaled:
    """The same weights in finer groups. Each new group is part of one old group."""
    first = torch.empty(int(group_of.max()) + 1, dtype=torch.long)
    first[group_of] = matrix.group_of
    zeros = None if matrix.zeros is None else matrix.zeros[:, first]
    return replace(matrix, scales=matrix.scales[:, first], zeros=zeros, group_of=group_of)


def evenly_grouped(matrix: GroupScaled) -> tuple[GroupScaled, int]:
    """The same weights in groups of as many consecutive inputs each, the last one perhaps of fewer, and that number.

    It is the number of inputs if all are one group, and 1 if groups are in no order.
    """
    size = _even_size(matrix.group_of)
    group_of = torch.arange(len(matrix.group_of)) // size
    has_no_others = matrix.scales.shape[1] == -(-len(group_of) // size)  # a share may have scales of other columns
    if has_no_others and torch.equal(group_of, matrix.group_of):
        return matrix, size
    return _with_groups(matrix, group_of), size


def _even_size(group_of: torch.Tensor) -> int:
    ends = torch.nonzero(group_of[1:] != group_of[:-1]).flatten() + 1
    return math.gcd(*ends.tolist()) if len(ends) else len(group_of)


def is_packable(matrix: GroupScaled) -> bool:
    """True if the native library can multiply the integers: groups are even, and values have at most 8 bits."""
    return not matrix.is_float and is_packed(len(matrix.group_of), matrix.bits, _even_size(matrix.group_of))


def form_of(matrix: GroupScaled) -> Narrow:
    """How a matrix is stored: in groups of as many consecutive inputs each, perhaps of one."""
    has_zeros, group = matrix.zeros is not None, _even_size(matrix.group_of)
    return Narrow(matrix.bits, group, has_zeros, matrix.inputs, matrix.is_float, matrix.mxfp4)


def rounds_inputs(matrix: GroupScaled) -> bool:
    """True if a CPU rounds activations for a matrix: where the native library would multiply its integers."""
    return isinstance(matrix.inputs, RoundedInputs) and is_packable(matrix)


def packed_bits(matrix: GroupScaled) -> int:
    """Bits in which the library keeps a matrix with signed values."""
    if matrix.is_float:
        return matrix.bits
    low, high = (int(each) for each in matrix.values.aminmax())
    return next(bits for bits in BITS if -(1 << (bits - 1)) <= low and high < 1 << (bits - 1))


def pack_scaled(matrix: GroupScaled, take: Callable[..., torch.Tensor] = torch.empty) -> IntegerPanels:
    """Pack a matrix for which `is_packable` is true. take: `take(shape, dtype=…)` returns memory for the result."""
    even, group = evenly_grouped(with_signed_values(matrix))
    rows, inputs = even.values.shape
    bits = packed_bits(even)
    data, scales = integer_sizes(rows, inputs, bits, group)
    rounded = {"input_bits": 8, "input_block": even.inputs.block} if isinstance(even.inputs, RoundedInputs) else {}
    return pack_integers(
        even.values, even.scales * even.factor, even.zeros, bits=bits, group=group,
        out=(take(data, dtype=torch.uint8), take(scales, dtype=torch.float32)), **rounded,
    )  # fmt: skip


def with_signed_values(matrix: GroupScaled) -> GroupScaled:
    """The same weights with integers from -2^(bits-1) to 2^(bits-1) - 1, if they are all above -1."""
    half = 1 << (matrix.bits - 1)
    if matrix.is_float or matrix.bits >= SIGNED_BITS:  # int8 holds none above
        return matrix
    if int(matrix.values.max()) < half or int(matrix.values.min()) < 0:
        return matrix
    return replace(matrix, values=matrix.values - half, zeros=_zeros_of(matrix) - half)


def plain(weight: torch.Tensor | GroupScaled, dtype: torch.dtype) -> torch.Tensor:
    """A weight as a tensor: one that is quantised, multiplied in float32 and rounded to `dtype`."""
    return weight.dequantised(dtype) if isinstance(weight, GroupScaled) else weight
