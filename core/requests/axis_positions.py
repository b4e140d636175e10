"""Positions of a prompt's tokens where images stand on three axes: time, height and width (M-RoPE).

Text goes on by one on all axes. The rows of an image stand at their places in its grid, from where the text before it
has ended; the text behind it goes on after the longer side of the grid. So a prompt ends at a smaller position than it
has tokens, and the answer begins there.

Tests: tests/core/requests/test_axis_positions.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .media import MediaItem


def axis_positions(media: Sequence[MediaItem], begin: int, end: int) -> np.ndarray:
    """Positions `[3, end - begin]` int64 of the tokens at places `begin … end`."""
    found = np.tile(np.arange(begin, end), (3, 1))
    shift = 0
    for item in media:
        if not item.grid:
            continue
        first, count = item.runs[0]
        low, high = (min(max(place, begin), end) for place in (first, first + count))
        rows = np.arange(low - first, high - first)
        if len(rows):
            found[:, low - begin : high - begin] = first + shift + np.stack(np.unravel_index(rows, item.grid))
        shift += item.position_shift
        found[:, high - begin :] += item.position_shift
    return found
