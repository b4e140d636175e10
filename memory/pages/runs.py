"""Finding runs of consecutive pages, for data that can't be split across scattered pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

BLOCKED = 1 << 16
"""Cost of a page that can't be taken: more than the cost of any run of other pages, which cost at most 1 each."""

_WIDTH = 256
"""Positions that share one noted minimum: about the square root of an arena's number of pages."""


def place_runs(sizes: Sequence[int], costs: np.ndarray) -> list[range] | None:
    """Choose disjoint runs of `sizes` pages each, fewer than `BLOCKED`; None if there are none.

    costs: `[pages]` uint32, the cost of taking each page: 0, 1, or `BLOCKED` if it can't be taken. The longest run is
    placed first. Each run is placed where it costs least, and among those as late as possible: pages are allocated from
    the front, so the runs then split few free stretches.
    """
    free = _Runs(costs)
    runs: list[range] = [range(0)] * len(sizes)
    placed: list[range] = []
    for size, group in groupby(sorted(range(len(sizes)), key=lambda index: -sizes[index]), sizes.__getitem__):
        if size > len(costs) or size >= BLOCKED:
            return None
        free.open(size, placed)
        for index in group:
            first = free.take()
            if first is None:
                return None
            runs[index] = range(first, first + size)
            placed.append(runs[index])
    return runs


class _Runs:
    """Costs of runs of one size by first page, with the minimum of every `_WIDTH` of them: scanning all is too slow."""

    def __init__(self, costs: np.ndarray) -> None:
        self._sums = np.zeros(len(costs) + 1, np.uint32)  # modulo 2**32; the cost of a run is a difference and smaller
        np.cumsum(costs, dtype=np.uint32, out=self._sums[1:])
        self._costs = np.empty(-(-len(self._sums) // _WIDTH) * _WIDTH, np.uint32)
        self._table = self._costs.reshape(-1, _WIDTH)
        self._least = np.empty(len(self._table), np.uint32)
        self._stale = slice(0)  # rows whose minimum is stale
        self._size = self._next = self._cost = 0

    def open(self, size: int, placed: Sequence[range]) -> None:
        """Start with runs of a size. placed: runs already taken."""
        count = len(self._sums) - size
        np.subtract(self._sums[size:], self._sums[:count], out=self._costs[:count])
        self._costs[count:] = BLOCKED
        for run in placed:
            self._costs[max(0, run.start - size + 1) : run.stop] = BLOCKED
        self._size, self._next, self._stale = size, -1, slice(len(self._table))

    def take(self) -> int | None:
        """Take the last run of minimum cost and return its first page, or None; later runs can't overlap it."""
        first, stop = self._next, self._stale.stop
        if first < 0 or self._costs[first] != self._cost:  # else it ends where the previous one begins
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
