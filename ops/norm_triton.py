"""RMSNorm on a GPU, with the addition to the residual stream in the same pass.

Rounds where the torch path rounds: the sum, the normalised value and the product with the weight, each to x's dtype.
Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax: its arguments and loops are not what type checkers take them for.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elementwise_schedule import norm_constants, norm_options


@triton.jit
def rms_norm_rows(
    y, x, residual, weight, eps, x_stride, y_stride, residual_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """y[t] = x[t] / sqrt(mean(x[t]²) + eps) · weight; with ADD of residual[t] += x[t] instead of x[t].

    Grid (tokens,). y, x, residual: [tokens, WIDTH], rows …_stride apart; weight: [WIDTH].
    """
    row = tl.program_id(0).to(tl.int64)
    dtype = y.dtype.element_ty
    column = tl.arange(0, BLOCK)
    own = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=own, other=0.0).to(tl.float32)
    if ADD:
        stream = residual + row * residual_stride + column
        value = (value + tl.load(stream, mask=own, other=0.0).to(tl.float32)).to(dtype)
        tl.store(stream, value, mask=own)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    value = (value * scale).to(dtype).to(tl.float32)
    factor = tl.load(weight + column, mask=own, other=0.0).to(tl.float32)
    tl.store(y + row * y_stride + column, (factor * value).to(dtype), mask=own)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `norm.rms_norm`."""
    return _launch(x, None, weight, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """As `norm.add_rms_norm`."""
    return _launch(x, residual, weight, eps)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    tokens, width = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not tokens:
        return y
    stream = x if residual is None else residual
    if x.stride(1) != 1 or stream.stride(1) != 1:
        raise ValueError("rows of x and of the residual are contiguous")
    rms_norm_rows[(tokens,)](
        y, x, stream, weight, eps, x.stride(0), y.stride(0), stream.stride(0),
        **norm_constants(width, residual is not None), **norm_options(width),
    )  # fmt: skip
    return y
