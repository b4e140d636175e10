"""Runs of consecutive pages for what can't go on in a page elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def place_runs(sizes: Sequence[int], costs: np.ndarray) -> list[range] | None:
    """Disjoint runs of `sizes` pages each; None where none were found.

    costs: `[pages]` float, what taking a page costs, infinite where it can't be had. The longest run is placed first,
    each where it costs least, then as far behind as it goes: pages are allocated from the front, so that runs split
    little of what is free.
    """
    costs = costs.astype(np.float64)
    runs: list[range] = [range(0)] * len(sizes)
    totals = np.zeros(0)  # of a run from each page on, the last first; runs of one size share them
    last_size = 0
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        if size > len(costs):
            return None
        if size != last_size:
            totals, last_size = _totals(costs, size)[::-1].copy(), size
        place = int(np.argmin(totals))
        if np.isinf(totals[place]):
            return None
        first = len(totals) - 1 - place
        runs[index] = range(first, first + size)
        costs[first : first + size] = np.inf
        totals[max(0, place - size + 1) : place + size] = np.inf
    return runs


def _totals(costs: np.ndarray, size: int) -> np.ndarray:
    """Costs of a run of `size` pages from each page on that it fits behind; infinite where a page can't be had."""
    blocked = np.isinf(costs)
    sums = np.concatenate(([0.0], np.cumsum(np.where(blocked, 0.0, costs))))
    barriers = np.concatenate(([0], np.cumsum(blocked)))
    return np.where(barriers[size:] > barriers[:-size], np.inf, sums[size:] - sums[:-size])
