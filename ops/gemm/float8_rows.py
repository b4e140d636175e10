"""Rows of activations in FP8 (E4M3), and their products with weights in FP8.

A row `x` becomes `x / s`, rounded once to the nearest E4M3, ties to even, with `s` the least power of two for which no
element is beyond ±448. It stands for `s` times that, which bfloat16 and float32 hold exactly: every way to multiply it
multiplies the same numbers. Each row is rounded by itself. A row with an element that is not finite becomes NaN.

Tests: tests/ops/gemm/test_float8_rows.py
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import linear

from .narrow_weights import NarrowWeight

DTYPE = torch.float8_e4m3fn

MULTIPLE = 16
"""Inputs and outputs of a product of FP8 with FP8 must be multiples of it."""

#: Bits of a float32's fraction. Adding `_CARRY` to its bits raises the exponent if the fraction is above 448's, 0.75.
_FRACTION, _CARRY = 23, 0x1FFFFF


class Float8Rows(NamedTuple):
    """Rows of activations in FP8."""

    values: torch.Tensor
    """float8_e4m3fn `[rows, in]`."""
    scales: torch.Tensor
    """float32 `[rows, 1]`, powers of two; NaN of a row with an element that is not finite."""


def quantised(x: torch.Tensor) -> Float8Rows:
    """Rows `[rows, in]` in FP8: on a GPU in one launch, elsewhere by torch."""
    if x.is_cuda:
        from .float8_rows_triton import quantise  # needs triton

        return Float8Rows(*quantise(x))
    wide = x.float()
    most = wide.abs().amax(-1, keepdim=True)
    exponent = ((most.view(torch.int32) + _CARRY) >> _FRACTION) - 8  # 448 is 1.75 · 2^8
    scales = (exponent.clamp_min(1) << _FRACTION).view(torch.float32)
    scales = scales.masked_fill(~most.isfinite(), torch.nan)
    return Float8Rows((wide * (1 / scales)).to(DTYPE), scales)


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Rows `[rows, in]` as the numbers that they stand for in FP8, in x's dtype."""
    if x.is_cuda:
        from .float8_rows_triton import round_rows  # needs triton

        return round_rows(x)
    values, scales = quantised(x)
    return (values.float() * scales).to(x.dtype)


def is_multiplied(weight: NarrowWeight) -> bool:
    """True if `product` can multiply rows with a weight: it is FP8 with one scale per row."""
    is_even = not any(size % MULTIPLE for size in weight.shape)
    return weight.float8 and weight.scales.shape[1] == 1 and is_even


def product(x: torch.Tensor, weight: NarrowWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weightᵀ + bias` of rows in FP8 with a weight in FP8, as they are, in x's dtype. See `is_multiplied`.

    Sums are float32, multiplied by both scales, and rounded once, or twice with a bias.
    """
    rows = quantised(x)
    matrices = rows.values, weight.data.view(DTYPE).t()
    # its name without an underscore, in torch.nn.functional, is newer than torch 2.9
    y = torch._scaled_mm(*matrices, rows.scales, weight.scales.t(), out_dtype=x.dtype)  # noqa: SLF001
    return y if bias is None else y.add_(bias)


def multiply(x: torch.Tensor, weight: NarrowWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weightᵀ + bias` with a weight that says that rows are rounded: by `product`, or widened by the library."""
    if weight.multiplies_float8:
        return product(x, weight, bias)
    return linear(rounded(x), weight.dense(), bias)


# pyright: reportPrivateImportUsage=false
