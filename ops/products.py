"""Products of rows with weights, and the norm and the activation around them: by the library, or by our kernel for few.

By the library on any device; ours needs Triton and at most `small_gemm_schedule.MAX_ROWS` rows in 16 bits.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch.nn.functional import linear

from .elementwise import add_rms_norm, rms_norm, silu_and_mul


class Way(StrEnum):
    """Who multiplies. SMALL: our kernel, with the activation behind the product where there is one. NORMED: as SMALL,
    and the norm before it in the same launch.
    """

    LIBRARY = "library"
    SMALL = "small"
    NORMED = "normed"


def multiply(way: Way, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weightᵀ + bias`. x: `[rows, in]`, weight: `[out, in]`."""
    if way is Way.LIBRARY:
        return linear(x, weight, bias)
    from . import small_gemm_triton

    return small_gemm_triton.multiply(x, weight, bias)


def multiply_and_gate(
    way: Way, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`silu(gate) · up` of the halves of `x @ weightᵀ + bias`; the same bits as one after the other of the same way."""
    if way is Way.LIBRARY:
        return silu_and_mul(linear(x, weight, bias))
    from . import small_gemm_triton

    return small_gemm_triton.multiply(x, weight, bias, silu=True)


def add_and_norm(out: torch.Tensor | None, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of `residual`, to which `out`, if there is any, is added in place."""
    return rms_norm(residual, norm, eps) if out is None else add_rms_norm(out, residual, norm, eps)


def norm_and_multiply(
    out: torch.Tensor | None,
    residual: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gate: bool,
    keep: bool,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """`add_and_norm` and the product, gated or not, by one launch of ours.

    Returns the normed rows where they are to be kept, the residual, which is another one where `out` was added, and the
    product.
    """
    from . import small_gemm_triton

    x, before = (residual, None) if out is None else (out, residual)
    return small_gemm_triton.add_norm_multiply(x, before, norm, eps, weight, bias, silu=gate, keep=keep)
