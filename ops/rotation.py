"""What the heads of a step are rotated by, and normalised with before."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Rotation:
    """A step's angles: token t's are in row `rows[t]` of cos and sin, in row t where `rows` is None.

    cos, sin: `[…, dim]` of the model's dtype, for the first `dim` elements of a head. rows: `[tokens]` int64.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None

    interleaved: bool = False
    """Elements 2i and 2i + 1 rotate together, rather than i and i + dim / 2."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of queries and keys before they are rotated. q, k: `[head_dim]` for every head by itself (Qwen3), or
    `[heads · head_dim]` for all heads of a token at once (OLMo 2).
    """

    q: torch.Tensor
    k: torch.Tensor
    eps: float
