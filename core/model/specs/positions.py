"""Specifications of vectors that stand for positions, and are added to tokens' embeddings.

Tests: tests/core/model/specs/test_positions.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class PositionTable:
    """A vector for each position (GPT-2, OPT)."""

    rows: int
    """Positions that the table has."""

    first: int = 0
    """The row of position 0; those before it are never added."""

    is_made: bool = False
    """No checkpoint has it: it is made of sines and cosines (XGLM)."""


def sinusoids(rows: int, width: int) -> torch.Tensor:
    """Sines of a position at falling frequencies, then cosines: `[rows, width]` float32; the last column is 0 where the
    width is odd ("Attention Is All You Need", arXiv 1706.03762 §3.5, as fairseq orders them).
    """
    import torch

    half = width // 2
    falling = torch.exp(torch.arange(half, dtype=torch.int64).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(rows, dtype=torch.int64).float()[:, None] * falling
    table = torch.cat((angles.sin(), angles.cos()), 1)
    return torch.cat((table, table.new_zeros(rows, width - 2 * half)), 1)
