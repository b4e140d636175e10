"""What the heads of a step are rotated by, and normalised with before."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class Rotation:
    """A step's angles: token t's are in row `rows[t]` of cos and sin, in row t where `rows` is None.

    cos, sin: `[…, head_dim]` of the model's dtype; rows: `[tokens]` int64.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query and key head before it is rotated (Qwen3). q, k: `[head_dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float
