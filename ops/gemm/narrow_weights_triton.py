"""Narrow weights widened to the values that they stand for, in Triton.

Import this module lazily: it needs triton. Tests: tests/ops/gemm/test_narrow_weights.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..launch_triton import KernelLauncher
from .narrow_weights_schedule import WIDEN_WARPS, WidenConstants


@triton.jit
def _pair(halves, dtype: tl.constexpr):
    """The two numbers whose bits are the lower and the upper half of each 32-bit word, `[..., 2]`."""
    low = (halves & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True)
    high = (halves >> 16).to(tl.uint16).to(dtype, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _add_16(words, FIRST: tl.constexpr, dtype: tl.constexpr):
    """16 plus the four bits from FIRST on of both halves of words, `[..., 2]`.

    The four bits become the highest of a mantissa whose exponent is 4, so that two numbers take a shift and a logical
    operation, and no conversion.
    """
    PLACE: tl.constexpr = 3 if dtype == tl.bfloat16 else 6
    SIXTEENS: tl.constexpr = 0x41804180 if dtype == tl.bfloat16 else 0x4C004C00
    moved = words >> (FIRST - PLACE) if FIRST > PLACE else words << (PLACE - FIRST)
    return _pair((moved & (0x000F000F << PLACE)) | SIXTEENS, dtype)


@triton.jit
def _in_order(even, odd):
    """Numbers of words `[..., n, halves, 8 bits of a half]`, of their lower and their upper four bits, as inputs:
    `[..., 8 · n]`.
    """
    numbers = tl.join(even, odd)
    words: tl.constexpr = numbers.shape[len(numbers.shape) - 4]
    if len(numbers.shape) == 5:
        numbers = tl.reshape(numbers, (numbers.shape[0], words // 4, 4, 2, 2, 2))
        numbers = tl.permute(numbers, (0, 1, 4, 5, 2, 3))
        numbers = tl.reshape(numbers, (numbers.shape[0], words * 8))
    else:
        numbers = tl.reshape(numbers, (numbers.shape[0], numbers.shape[1], words // 4, 4, 2, 2, 2))
        numbers = tl.permute(numbers, (0, 1, 2, 5, 6, 3, 4))
        numbers = tl.reshape(numbers, (numbers.shape[0], numbers.shape[1], words * 8))
    return numbers


@triton.jit
def sixteen_more(words, dtype: tl.constexpr):
    """16 plus each whole number of 4 bits in words `[..., n]`, `[..., 8 · n]` in bf16 or fp16; see `NarrowWeight`."""
    even = tl.join(_add_16(words, 0, dtype), _add_16(words, 8, dtype))
    odd = tl.join(_add_16(words, 4, dtype), _add_16(words, 12, dtype))
    return _in_order(even, odd)


@triton.jit
def float8_values(words, dtype: tl.constexpr):
    """Values of the E4M3 bytes in words `[..., n]`, `[..., 4 · n]` in bf16 or fp16, which hold them exactly.

    With its exponent and mantissa moved in place, a number is a fixed power of 2 too small; subnormal ones, too. No
    instruction for E4M3 is needed, which compute capability 8.0 lacks.
    """
    TOO_FAR: tl.constexpr = 4 if dtype == tl.bfloat16 else 1
    POWER: tl.constexpr = 2.0**120 if dtype == tl.bfloat16 else 256.0
    upper = words & 0x7F007F00
    lower = (words << 8) & 0x7F007F00
    upper = (upper >> TOO_FAR) | (words & -0x7FFF8000)
    lower = (lower >> TOO_FAR) | ((words << 8) & -0x7FFF8000)
    values = tl.join(_pair(lower, dtype), _pair(upper, dtype))  # [..., n, halves, bytes of a half]
    if len(words.shape) == 3:
        values = tl.reshape(values, (words.shape[0], words.shape[1], words.shape[2] * 4))
    else:
        values = tl.reshape(values, (words.shape[0], words.shape[1] * 4))
    return values * tl.full(values.shape, POWER, dtype)


@triton.jit
def _values(data, BITS: tl.constexpr, FLOAT8: tl.constexpr):
    """Stored values in float32 `[..., inputs]`."""
    if FLOAT8:
        values = float8_values(data, tl.float16).to(tl.float32)
    elif BITS == 4:
        values = sixteen_more(data, tl.float16).to(tl.float32) - 16.0
    else:
        values = data.to(tl.float32)
    return values


@triton.jit(do_not_specialize=["outputs"])
def widen_rows(out, data, scales, zeros, outputs, C: tl.constexpr):
    """out[n, k] = (data[n, k] - zeros[n, k // group]) · scales[n, k // group], rounded once.

    Grid (blocks of rows, blocks of inputs). out: [outputs, d_in], contiguous, as are the others; see `NarrowWeight`.
    """
    BLOCK: tl.constexpr = C.inputs * C.bits // C.unit
    ROW: tl.constexpr = C.d_in * C.bits // C.unit
    GROUPS: tl.constexpr = (C.d_in + C.group - 1) // C.group
    row = (tl.program_id(0) * C.rows + tl.arange(0, C.rows)).to(tl.int64)[:, None]
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.program_id(1) * C.inputs + tl.arange(0, C.inputs)[None, :]
    own = row < outputs
    value = _values(tl.load(data + row * ROW + place, mask=own & (place < ROW), other=0), C.bits, C.float8)
    inside = own & (k < C.d_in)
    at = row * GROUPS + k // C.group
    if C.zeros:
        value -= tl.load(zeros + at, mask=inside, other=0.0)
    elif not C.float8:
        value -= 1 << (C.bits - 1)
    value *= tl.load(scales + at, mask=inside, other=0.0)
    tl.store(out + row * C.d_in + k, value.to(out.dtype.element_ty), mask=inside)


def widen(
    out: torch.Tensor,
    data: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    *,
    bits: int,
    group: int,
    float8: bool = False,
) -> None:
    """Write a weight to `out` `[out, in]`; the rest is as in `NarrowWeight`."""
    outputs, inputs = out.shape
    launch, constants = _launch(inputs, bits, group, zeros is not None, float8)
    data = data.view(torch.int32) if constants.unit == 32 else data
    grid = (-(-outputs // constants.rows), -(-inputs // constants.inputs), 1)
    launch(grid, (out, data, scales, scales if zeros is None else zeros), (outputs,), ())


@cache
def _launch(d_in: int, bits: int, group: int, zeros: bool, float8: bool) -> tuple[KernelLauncher, WidenConstants]:
    constants = WidenConstants(d_in, bits, group, zeros, float8)
    return KernelLauncher(widen_rows, {"C": constants, "num_warps": WIDEN_WARPS}), constants


@triton.jit
def _float4_pair(words, FIRST: tl.constexpr, dtype: tl.constexpr):
    """Values of E2M1 from bit FIRST on of both halves of words, `[..., 2]`."""
    PLACE: tl.constexpr = 6 if dtype == tl.bfloat16 else 9
    signs = words << (12 - FIRST)
    moved = words >> (FIRST - PLACE) if FIRST > PLACE else words << (PLACE - FIRST)
    return _pair((moved & (0x00070007 << PLACE)) | (signs & -0x7FFF8000), dtype)


@triton.jit
def float4_values(words, dtype: tl.constexpr):
    """Values of E2M1 in words `[..., n]`, `[..., 8 · n]` in bf16 or fp16, as `float8_values` has those of E4M3."""
    POWER: tl.constexpr = 2.0**126 if dtype == tl.bfloat16 else 16384.0
    even = tl.join(_float4_pair(words, 0, dtype), _float4_pair(words, 8, dtype))
    odd = tl.join(_float4_pair(words, 4, dtype), _float4_pair(words, 12, dtype))
    values = _in_order(even, odd)
    return values * tl.full(values.shape, POWER, dtype)


@triton.jit
def powers_of(exponents):
    """Powers of 2 in float32 of exponents with a bias of 127 (E8M0); the least is a subnormal number."""
    bits = exponents.to(tl.uint32) << 23
    return tl.where(exponents == 0, 1 << 22, bits).to(tl.float32, bitcast=True)


@triton.jit
def scaled_float4(words, exponents, dtype: tl.constexpr):
    """Weights in MXFP4, `[rows, inputs]`. words: `[rows, inputs / 8]`; exponents: `[rows, groups]`, see `powers_of`.

    Powers of 2 multiply weights exactly in bf16, which has float32's range.
    """
    HALF: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    WIDE: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float32
    values, powers = float4_values(words, HALF).to(WIDE), powers_of(exponents).to(WIDE)
    rows: tl.constexpr = values.shape[0]
    inputs: tl.constexpr = values.shape[1]
    groups: tl.constexpr = exponents.shape[1]
    each = tl.broadcast_to(tl.expand_dims(powers, 2), (rows, groups, inputs // groups))
    return (values * tl.reshape(each, (rows, inputs))).to(dtype)


@triton.jit(do_not_specialize=["outputs"])
def widen_float4_rows(out, data, scales, outputs, C: tl.constexpr):
    """As `widen_rows`, of MXFP4: out[n, k] = data[n, k] · scales[n, k // group], rounded once."""
    BLOCK: tl.constexpr = C.inputs // 8
    ROW: tl.constexpr = C.d_in // 8
    GROUPS: tl.constexpr = C.d_in // C.group
    row = (tl.program_id(0) * C.rows + tl.arange(0, C.rows)).to(tl.int64)[:, None]
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)[None, :]
    k = tl.program_id(1) * C.inputs + tl.arange(0, C.inputs)[None, :]
    group = tl.program_id(1) * (C.inputs // C.group) + tl.arange(0, C.inputs // C.group)[None, :]
    own = row < outputs
    words = tl.load(data + row * ROW + place, mask=own & (place < ROW), other=0)
    exponents = tl.load(scales + row * GROUPS + group, mask=own & (group < GROUPS), other=0)
    value = scaled_float4(words, exponents, tl.float32).to(out.dtype.element_ty)
    tl.store(out + row * C.d_in + k, value, mask=own & (k < C.d_in))


def widen_float4(out: torch.Tensor, data: torch.Tensor, scales: torch.Tensor) -> None:
    """Write a weight in MXFP4 to `out` `[out, in]`; the rest is as in `NarrowWeight`."""
    outputs, inputs = out.shape
    launch, constants = _launch_float4(inputs, inputs // scales.shape[-1])
    grid = (-(-outputs // constants.rows), -(-inputs // constants.inputs), 1)
    launch(grid, (out, data.view(torch.int32), scales), (outputs,), ())


@cache
def _launch_float4(d_in: int, group: int) -> tuple[KernelLauncher, WidenConstants]:
    constants = WidenConstants(d_in, 4, group, zeros=False)
    return KernelLauncher(widen_float4_rows, {"C": constants, "num_warps": WIDEN_WARPS}), constants


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalOperand=false, reportAssignmentType=false
