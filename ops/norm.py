"""Root-mean-square layer norm: torch on a CPU, Triton on a GPU."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension, statistics in float32.

    x: `[tokens, hidden]`; on a CPU any number of dimensions.
    """
    if x.is_cuda:
        from . import norm_triton

        return norm_triton.rms_norm(x, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x` in place; returns the norm of the sum. x, residual: `[tokens, hidden]` of one dtype."""
    if x.is_cuda:
        from . import norm_triton

        return norm_triton.add_rms_norm(x, residual, weight, eps)
    return rms_norm(residual.add_(x), weight, eps)
