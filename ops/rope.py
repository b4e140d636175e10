"""Rotary position embedding, half-split form (Hugging Face's Llama)."""

from __future__ import annotations

import torch


def rotary_table(inv_freq: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each `[num_positions, 2·len(inv_freq)]` float32, of position · frequency."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads. x: `[tokens, heads, head_dim]`; cos, sin: `[tokens, 1, head_dim]` of x's dtype."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin
