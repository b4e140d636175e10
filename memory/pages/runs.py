"""Runs of consecutive pages for what can't go on in a page elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

BLOCKED = 1 << 16
"""Cost of a page that can't be had: more than that of a run of others, which are fewer and cost 1 at most."""

_WIDTH = 256
"""Places that have their least cost noted together. Chosen: near the root of the pages that an arena has."""


def place_runs(sizes: Sequence[int], costs: np.ndarray) -> list[range] | None:
    """Disjoint runs of `sizes` pages each, fewer than `BLOCKED`; None where none were found.

    costs: `[pages]` uint32, what taking a page costs: 0, 1, or `BLOCKED` where it can't be had. The longest run is
    placed first, each where it costs least, then as far behind as it goes: pages are allocated from the front, so that
    runs split little of what is free.
    """
    places = _Places(costs)
    runs: list[range] = [range(0)] * len(sizes)
    placed: list[range] = []
    for size, group in groupby(sorted(range(len(sizes)), key=lambda index: -sizes[index]), sizes.__getitem__):
        if size > len(costs) or size >= BLOCKED:
            return None
        places.open(size, placed)
        for index in group:
            first = places.take()
            if first is None:
                return None
            runs[index] = range(first, first + size)
            placed.append(runs[index])
    return runs


class _Places:
    """First pages of runs of one size, with the least cost of each `_WIDTH` of them: scanning all takes too long."""

    def __init__(self, costs: np.ndarray) -> None:
        self._sums = np.zeros(len(costs) + 1, np.uint32)  # modulo 2**32; a run's cost, a difference, is less
        np.cumsum(costs, dtype=np.uint32, out=self._sums[1:])
        self._costs = np.empty(-(-len(self._sums) // _WIDTH) * _WIDTH, np.uint32)
        self._table = self._costs.reshape(-1, _WIDTH)
        self._least = np.empty(len(self._table), np.uint32)
        self._stale = slice(0)  # rows with a stale least cost
        self._size = self._next = self._cost = 0

    def open(self, size: int, placed: Sequence[range]) -> None:
        """Begin with runs of a size. placed: runs already taken."""
        count = len(self._sums) - size
        np.subtract(self._sums[size:], self._sums[:count], out=self._costs[:count])
        self._costs[count:] = BLOCKED
        for run in placed:
            self._costs[max(0, run.start - size + 1) : run.stop] = BLOCKED
        self._size, self._next, self._stale = size, -1, slice(len(self._table))

    def take(self) -> int | None:
        """Take the last run of least cost, so that later ones don't overlap it; return its first page, None without."""
        first, stop = self._next, self._stale.stop
        if first < 0 or self._costs[first] != self._cost:  # else it ends where the last one begins
            np.minimum.reduce(self._table[self._stale], axis=1, out=self._least[self._stale])
            row = len(self._least) - 1 - int(self._least[::-1].argmin())
            self._cost = self._least[row]
            if self._cost >= BLOCKED:
                return None
            first = (row + 1) * _WIDTH - 1 - int(self._table[row, ::-1].argmin())
            stop = -(-(first + self._size) // _WIDTH)
        start = max(0, first - self._size + 1)
        self._costs[start : first + self._size] = BLOCKED
        self._stale = slice(start // _WIDTH, stop)
        self._next = first - self._size
        return first
