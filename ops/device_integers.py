"""Weights that are small whole numbers, as a GPU keeps and multiplies them.

Tests: tests/ops/test_device_integers.py, tests/ops/test_small_gemm_triton.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = (4, 8)
"""Bits of a kept weight."""

MULTIPLE = 64
"""A group's inputs must be a multiple of it, unless a row is one group: inputs that a kernel multiplies at once."""


WIDEN_WARPS = 4
"""Warps of a program that widens whole numbers."""


@dataclass(frozen=True, slots=True)
class WidenConstants:
    """Compile-time constants of a launch that widens whole numbers."""

    d_in: int
    bits: int
    group: int
    zeros: bool
    """Zero points are read; without, all are `2^(bits - 1)`."""
    rows: int = 16
    """Rows of a program."""
    inputs: int = 256


@dataclass(frozen=True, slots=True)
class DeviceIntegers:
    """A projection's weights: `weight[i, j] = (data[i, j] - zeros[i, g]) · scales[i, g]` for group `g = j // group`,
    multiplied in float32 and rounded once to `dtype`.

    Where a tensor is only asked for its shape, dtype and device, it may stand for the tensor.
    """

    data: torch.Tensor
    """uint8 `[out, in · bits / 8]`. Of 4 bits, a byte holds two inputs, the first in its lower half."""

    scales: torch.Tensor
    """float32 `[out, groups]`."""

    zeros: torch.Tensor | None
    """float32 `[out, groups]`, whole numbers. None: all are `2^(bits - 1)`."""

    bits: int
    group: int
    """Inputs that share a scale."""

    dtype: torch.dtype
    """Of the weights as they are multiplied."""

    @property
    def shape(self) -> torch.Size:
        """`[out, in]`."""
        return torch.Size((len(self.data), self.data.shape[1] * 8 // self.bits))

    @property
    def device(self) -> torch.device:
        return self.data.device

    @property
    def nbytes(self) -> int:
        """Bytes that it takes."""
        return sum(each.nbytes for each in (self.data, self.scales, self.zeros) if each is not None)

    def is_contiguous(self) -> bool:
        """Whether rows lie one after the other."""
        return self.data.is_contiguous()

    def __len__(self) -> int:
        return len(self.data)

    def dense(self) -> torch.Tensor:
        """The weight `[out, in]` in `dtype`: on a GPU in one launch, elsewhere by torch."""
        if self.data.is_cuda:
            from .device_integers_triton import widen  # needs triton

            return widen(self)
        outputs, inputs = self.shape
        values = self.data
        if self.bits == 4:
            values = torch.stack((values & 15, values >> 4), dim=-1).view(outputs, inputs)
        group_of = torch.arange(inputs, device=self.device) // self.group
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros[:, group_of]
        return ((values.float() - zeros) * self.scales[:, group_of]).to(self.dtype)


def is_kept(inputs: int, bits: int, group: int) -> bool:
    """True if a weight with rows of `inputs` in groups of `group` can be kept as whole numbers."""
    return bits in BITS and not inputs * bits % 8 and (group >= inputs or not group % MULTIPLE)


def keep(
    values: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
) -> DeviceIntegers:
    """Move whole numbers to a device. See `is_kept`, which they must be.

    values: int8 `[out, in]`, from -2^(bits-1) to 2^(bits-1) - 1. scales: float32 `[out, groups]`; zeros: whole numbers
    of that shape, or None if all are 0.
    """
    half = 1 << (bits - 1)
    data = (values.to(device).to(torch.int16) + half).to(torch.uint8)
    if bits == 4:
        data = data[:, ::2] | data[:, 1::2] << 4
    shifted = None if zeros is None else zeros.to(device, torch.float32) + half
    return DeviceIntegers(data.contiguous(), scales.to(device).contiguous(), shifted, bits, group=group, dtype=dtype)
