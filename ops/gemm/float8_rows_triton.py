"""Rows of activations rounded to FP8, in Triton.

Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..elementwise.elementwise_triton import _float8 as float8_bits
from ..launch_triton import KernelLauncher
from .float8_rows_schedule import RoundConstants


@triton.jit
def _values(data):
    """Values in float32 of E4M3: a float16 with its bits, of a subnormal one, too, is a 256th of it."""
    wide = data.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def round_float8_rows(out, scales, x, x_stride, C: tl.constexpr):
    """out[t] = x[t] in E4M3 (uint8) times 1 / scales[t], or, if C.dense, the numbers that it stands for.

    Grid (rows,). x: [rows, width] with the given row stride. out: [rows, width]. scales: [rows], not written
    if C.dense. The scale is found in the bits of the largest element, without a division: see `float8_rows.quantised`.
    """
    WIDTH: tl.constexpr = C.width
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, C.block)
    own = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=own, other=0.0).to(tl.float32)
    broken = tl.sum(value * 0.0, axis=0)  # NaN if an element is not finite, else 0
    most = tl.max(tl.abs(value), axis=0).to(tl.int32, bitcast=True)
    exponent = tl.maximum(((most + 0x1FFFFF) >> 23) - 8, 1)
    scale = (exponent << 23).to(tl.float32, bitcast=True) + broken
    inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    bits = float8_bits(value * inverse)
    place = out + row * WIDTH + column
    if C.dense:
        tl.store(place, (_values(bits) * scale).to(out.dtype.element_ty), mask=own)
    else:
        tl.store(place, bits, mask=own)
        tl.store(scales + row, scale)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same as `float8_rows.quantised`, but for the values of rows that are not finite, whose scale is NaN."""
    values = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
    _round(x, values, scales)
    return values.view(torch.float8_e4m3fn), scales


def round_rows(x: torch.Tensor) -> torch.Tensor:
    """The same as `float8_rows.rounded`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _round(x, out, out)
    return out


def _round(x: torch.Tensor, out: torch.Tensor, scales: torch.Tensor) -> None:
    if not len(x):
        return
    if x.stride(1) != 1:
        raise ValueError("rows of x must be contiguous")
    _launch(x.shape[1], out is scales)((len(x), 1, 1), (out, scales, x), (), (x.stride(0),))


@cache
def _launch(width: int, dense: bool) -> KernelLauncher:
    constants = RoundConstants(width, dense)
    return KernelLauncher(round_float8_rows, {"C": constants, "num_warps": constants.warps})


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false
