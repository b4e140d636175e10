"""Functions of single values whose bits don't depend on how many values there are.

On a CPU, PyTorch computes the last values of an array, and the last of each thread's share of it, by another routine
than the others: `torch.sigmoid` of the same value has other bits at another place. `exp`, `tanh`, `erf`, `log1p` and
arithmetic have the same bits everywhere, so the functions here are made of them, in float32, and rounded once.

Tests: tests/ops/elementwise/test_activations.py
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

_HALF_ROOT, _ROOT, _CUBE = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715

#: From here on softplus is its argument, as in PyTorch.
_LINEAR = 20.0


def sigmoid(x: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        return torch.sigmoid(x)
    return (1 / _one_more(x)).to(x.dtype)


def silu(x: torch.Tensor) -> torch.Tensor:
    """`x · sigmoid(x)`."""
    if x.is_cuda:
        return functional.silu(x)
    return (x.float() / _one_more(x)).to(x.dtype)


def softplus(x: torch.Tensor) -> torch.Tensor:
    """`log(1 + exp(x))`."""
    if x.is_cuda:
        return functional.softplus(x)
    wide = x.float()
    return torch.where(wide > _LINEAR, wide, torch.exp(wide.clamp(max=_LINEAR)).log1p_()).to(x.dtype)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """`x · Φ(x)`."""
    if x.is_cuda:
        return functional.gelu(x)
    wide = x.float()
    return (torch.erf(wide * _HALF_ROOT).add_(1).mul_(0.5) * wide).to(x.dtype)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """`gelu` by its approximation with tanh."""
    if x.is_cuda:
        return functional.gelu(x, approximate="tanh")
    wide = x.float()
    inner = (wide * wide).mul_(_CUBE).add_(1).mul_(wide).mul_(_ROOT)
    return (inner.tanh_().add_(1).mul_(0.5) * wide).to(x.dtype)


def _one_more(x: torch.Tensor) -> torch.Tensor:
    """`1 + exp(-x)`, float32."""
    return torch.neg(x.float()).exp_().add_(1)
