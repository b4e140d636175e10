"""Rotary position embedding, half-split form (Hugging Face's Llama)."""

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


class RotaryEmbedding:
    """cos and sin of every position, in the model's dtype."""

    def __init__(
        self, inv_freq: torch.Tensor, num_positions: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        cos, sin = rotary_table(inv_freq, num_positions)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)

    def at(self, positions: torch.Tensor) -> Rotation:
        """positions: `[tokens]` int64. Gathered once a step on a CPU; a GPU's kernels find the rows themselves."""
        if positions.is_cuda:
            return Rotation(self._cos, self._sin, positions)
        return Rotation(self._cos[positions], self._sin[positions], None)


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
