"""Weights of 4 or 8 bits with scales, as a GPU keeps and multiplies them.

Tests: tests/ops/test_narrow_weights.py, tests/ops/test_small_gemm_triton.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BITS = (4, 8)
"""Bits of a kept weight."""

MULTIPLE = 64
"""A group's inputs must be a multiple of it, unless a row is one group: inputs that a kernel multiplies at once."""


@dataclass(frozen=True, slots=True)
class NarrowWeight:
    """A projection's weights: `weight[i, j] = (data[i, j] - zeros[i, g]) · scales[i, g]` for group `g = j // group`, or
    `data[i, j] · scales[i, g]` of FP8, multiplied in float32 and rounded once to `dtype`.

    Where a tensor is only asked for its shape, dtype and device, it may stand for the tensor.
    """

    data: torch.Tensor
    """uint8 `[out, in · bits / 8]`: integers, or the bits of E4M3. Of 4 bits, a byte holds two inputs, the first in its
    lower half.
    """

    scales: torch.Tensor
    """float32 `[out, groups]`."""

    zeros: torch.Tensor | None
    """float32 `[out, groups]`, integers. None: all are `2^(bits - 1)`."""

    bits: int
    group: int
    """Inputs that share a scale."""

    dtype: torch.dtype
    """Of the weights as they are multiplied."""

    float8: bool = False
    """The weights are FP8 (E4M3)."""

    rounds_inputs: bool = False
    """Rows that are multiplied with it are rounded to FP8 first: see `float8_rows`."""

    multiplies_float8: bool = False
    """The library multiplies these rows in FP8, with the weights as they are; else both are widened for it."""

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
        outputs, inputs = self.shape
        if self.data.is_cuda:
            from .narrow_weights_triton import widen  # needs triton

            out = torch.empty(outputs, inputs, dtype=self.dtype, device=self.device)
            widen(out, self.data, self.scales, self.zeros, bits=self.bits, group=self.group, float8=self.float8)
            return out
        values = self.data
        if self.bits == 4:
            values = torch.stack((values & 15, values >> 4), dim=-1).view(outputs, inputs)
        group_of = torch.arange(inputs, device=self.device) // self.group
        if self.float8:
            return (values.view(torch.float8_e4m3fn).float() * self.scales[:, group_of]).to(self.dtype)
        zeros = 1 << (self.bits - 1) if self.zeros is None else self.zeros[:, group_of]
        return ((values.float() - zeros) * self.scales[:, group_of]).to(self.dtype)


def is_kept(inputs: int, bits: int, group: int) -> bool:
    """True if a weight with rows of `inputs` in groups of `group` can be kept in so many bits."""
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
) -> NarrowWeight:
    """Move a weight to a device. See `is_kept`, which it must be.

    values: float8_e4m3fn, or int8 from -2^(bits-1) to 2^(bits-1) - 1, `[out, in]`. scales: float32 `[out, groups]`;
    zeros: integers of that shape, or None if all are 0.
    """
    scales = scales.to(device).contiguous()
    if values.is_floating_point():
        data = values.view(torch.uint8).to(device, copy=True)
        return NarrowWeight(data, scales, None, bits, group=group, dtype=dtype, float8=True)
    half = 1 << (bits - 1)
    data = (values.to(device).to(torch.int16) + half).to(torch.uint8)
    if bits == 4:
        data = data[:, ::2] | data[:, 1::2] << 4
    shifted = None if zeros is None else zeros.to(device, torch.float32) + half
    return NarrowWeight(data.contiguous(), scales, shifted, bits, group=group, dtype=dtype)
