"""Blocks: tokens of a prompt that see each other, also those behind them, as an image's do in some models.

Tests: tests/ops/attention/test_blocks.py
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np


class BlockMask(IntEnum):
    """What a layer's tokens see of their block, beside the tokens up to their own."""

    NONE = 0
    """Nothing: the layer is causal."""

    IN_WINDOW = 1
    """All tokens behind them. Those before them only as far as the layer's window goes."""

    WHOLE = 2
    """All of it, however short the layer's window is."""


class BlockSpans(NamedTuple):
    """The blocks of a step's tokens, each of which lies in the step as a whole."""

    before: np.ndarray
    """`[tokens]` int32: tokens of its block before each; 0 for one that is in none."""
    behind: np.ndarray
    """`[tokens]` int32: likewise, behind it."""
