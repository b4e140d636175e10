"""Narrow values with a scale for each group of a row's columns: the common form of AWQ, GPTQ, FP8 and their like."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .rounded_inputs import Float8Inputs, RoundedInputs

if TYPE_CHECKING:
    import torch

#: Stored integers of so many bits do not fit int8 as they are.
SIGNED_BITS = 8

_CHUNK = 1 << 20  # elements that are dequantised at a time, which stay in a processor's cache


@dataclass(frozen=True, slots=True)
class GroupScaled:
    """`weight[i, j] = (values[i, j] - zeros[i, g]) · scales[i, g] · factor` for group `g = group_of[j]`."""

    values: torch.Tensor
    """int8 or float8_e4m3fn `[out, in]`."""

    bits: int
    """Bits of a stored value; integers are within -2^(bits-1) and 2^bits - 1."""

    scales: torch.Tensor
    """float32 `[out, groups]`."""

    zeros: torch.Tensor | None
    """int16 `[out, groups]`. None: all are 0."""

    group_of: torch.Tensor
    """int64 `[in]`, on the CPU wherever the values are: each column's group. Groups of consecutive columns ascend; with
    act order they are in any order.
    """

    factor: float = 1.0
    """Multiplies every product in float32."""

    inputs: RoundedInputs | Float8Inputs | None = None
    """How activations are rounded before they are multiplied with it; None: they are not."""

    mxfp4: bool = False
    """Values are twice numbers of FP4 (E2M1), and scales half of powers of 2."""

    @property
    def is_float(self) -> bool:
        """True if values are in FP8."""
        return self.values.is_floating_point()

    def dequantised(self, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return the weight, multiplied in float32, where its values are. dtype: None: float32."""
        import torch

        weight = torch.empty(self.values.shape, dtype=dtype or torch.float32, device=self.values.device)
        self.dequantise_into(weight)
        return weight

    def dequantise_into(self, target: torch.Tensor) -> None:
        """Compute the weight in float32 and cast it into `target` `[out, in]`."""
        one = self.scales.shape[1] == 1
        for rows in row_chunks(target):
            weight = self.values[rows].float()
            if self.zeros is not None:
                zeros = self.zeros[rows].float()
                weight -= zeros if one else zeros[:, self.group_of]
            scales = self.scales[rows]
            weight *= scales if one else scales[:, self.group_of]
            if self.factor != 1:
                weight *= self.factor
            target[rows].copy_(weight)


def row_chunks(matrix: torch.Tensor, size: int = _CHUNK, multiple: int = 1) -> Iterator[slice]:
    """Runs of a multiple of `multiple` rows of a matrix, of about `size` elements."""
    rows, columns = matrix.shape
    step = max(1, size // max(1, columns) // multiple) * multiple
    return (slice(first, min(first + step, rows)) for first in range(0, rows, step))


def groups_of(columns: slice, size: int | None) -> tuple[slice, torch.Tensor]:
    """The groups of consecutive columns that `columns` are in, and each column's place among them.

    size: columns per group. None: a row is one group.
    """
    import torch

    if size is None:
        return slice(0, 1), torch.zeros(columns.stop - columns.start, dtype=torch.int64)
    first = columns.start // size
    return slice(first, -(-columns.stop // size)), torch.arange(columns.start, columns.stop) // size - first


def signed(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned integers (uint8) as int8: of 8 bits, 128 less."""
    import torch

    return (values ^ 0x80 if bits == SIGNED_BITS else values).view(torch.int8)


def signed_zeros(zeros: torch.Tensor, bits: int) -> torch.Tensor:
    """Zero points of integers that `signed` made, as int16."""
    import torch

    return zeros.to(torch.int16) - (128 if bits == SIGNED_BITS else 0)
