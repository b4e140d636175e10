"""Narrow weights widened to the values that they stand for, in Triton.

Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from .launch_triton import KernelLauncher
from .narrow_weights_schedule import WIDEN_WARPS, WidenConstants


@triton.jit
def unpacked(data, BITS: tl.constexpr, FLOAT8: tl.constexpr):
    """Stored values in float32 `[..., inputs]` of bytes `[..., inputs · bits / 8]`.

    An E4M3 value has the bits of a float16 of a 256th of it, subnormal ones, too: compute capability 8.0 has no
    instruction for E4M3.
    """
    if FLOAT8:
        wide = data.to(tl.uint16)
        half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
    value = data
    if BITS == 4:
        value = tl.interleave(data & 15, data >> 4)
    return value.to(tl.float32)


@triton.jit(do_not_specialize=["outputs"])
def widen_rows(out, data, scales, zeros, outputs, C: tl.constexpr):
    """out[n, k] = (data[n, k] - zeros[n, k // group]) · scales[n, k // group], rounded once.

    Grid (blocks of rows, blocks of inputs). out: [outputs, d_in], contiguous, as are the others; see `NarrowWeight`.
    """
    BYTES: tl.constexpr = C.inputs * C.bits // 8
    ROW_BYTES: tl.constexpr = C.d_in * C.bits // 8
    GROUPS: tl.constexpr = (C.d_in + C.group - 1) // C.group
    row = (tl.program_id(0) * C.rows + tl.arange(0, C.rows)).to(tl.int64)[:, None]
    byte = tl.program_id(1) * BYTES + tl.arange(0, BYTES)[None, :]
    k = tl.program_id(1) * C.inputs + tl.arange(0, C.inputs)[None, :]
    own = row < outputs
    value = unpacked(tl.load(data + row * ROW_BYTES + byte, mask=own & (byte < ROW_BYTES), other=0), C.bits, C.float8)
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
    grid = (-(-outputs // constants.rows), -(-inputs // constants.inputs), 1)
    launch(grid, (out, data, scales, scales if zeros is None else zeros), (outputs,), ())


@cache
def _launch(d_in: int, bits: int, group: int, zeros: bool, float8: bool) -> tuple[KernelLauncher, WidenConstants]:
    constants = WidenConstants(d_in, bits, group, zeros, float8)
    return KernelLauncher(widen_rows, {"C": constants, "num_warps": WIDEN_WARPS}), constants


@triton.jit
def unpacked_float4(data):
    """Values in float32 `[..., inputs]` of bytes `[..., inputs / 2]` of E2M1.

    An E2M1 value has the bits of a float16 of a 16384th of it, subnormal ones, too.
    """
    wide = tl.interleave(data & 15, data >> 4).to(tl.uint16)
    half = ((wide & 8) << 12) | ((wide & 7) << 9)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


@triton.jit
def powers_of(exponents):
    """Powers of 2 in float32 of exponents with a bias of 127 (E8M0); the least is a subnormal number."""
    bits = exponents.to(tl.uint32) << 23
    return tl.where(exponents == 0, 1 << 22, bits).to(tl.float32, bitcast=True)


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportOptionalOperand=false
