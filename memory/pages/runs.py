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
    for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
        size = sizes[index]
        if size > len(costs):
            return None
        blocked = np.isinf(costs)
        sums = np.concatenate(([0.0], np.cumsum(np.where(blocked, 0.0, costs))))
        barriers = np.concatenate(([0], np.cumsum(blocked)))
        totals = np.where(barriers[size:] > barriers[:-size], np.inf, sums[size:] - sums[:-size])
        first = len(totals) - 1 - int(np.argmin(totals[::-1]))
        if np.isinf(totals[first]):
            return None
        runs[index] = range(first, first + size)
        costs[first : first + size] = np.inf
    return runs
