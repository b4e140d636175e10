"""Prices of decode steps that are learned from the steps themselves, for policies of modes."""

from __future__ import annotations

import numpy as np

from ...memory.adapters.adapter import Adapter
from .mode_policy import Batch, work_of

LEAST = np.array([1.0, 1.0, 256.0, 1.0, 8.0, 8.0])
"""Least amount of each term by which its share of a step is guessed at first: one of rows and ranks says little."""

NOISE = 0.05
"""Share of a step's time by which it differs from others of the same work; chosen."""

KEPT = 0.999
"""Share of what is known that each step leaves, so that machines may change; chosen: a thousand steps count."""

MERGE_STEPS = 10.0
"""Steps that a merge is taken to cost before there has been one; chosen."""

MAX_SURPRISE = 0.2
"""Most share of its time by which a step changes prices: others may have had the processor in it."""

SWEEPS = 3
"""Rounds over the terms after each step; they go on from the prices before."""


class LearnedPrices:
    """A linear model of a decode step's time, whose prices are not below 0: the most likely ones after each step.

    Terms: a step, a row, a token of KV, whether there is LoRA work, rank-rows computed, rank-rows read. What steps
    leave open is shared out among their terms alike. That overrates LoRA, as often as not: merged mode is tried where
    it might help, and once it has been tried its price is known.
    """

    def __init__(self) -> None:
        count = len(LEAST)
        self._prices = np.zeros(count)
        self._squares = np.zeros((count, count))  # of the terms of all steps, and their products with the seconds
        self._sums = np.zeros(count)
        self._guess = np.zeros(count)  # what takes the place of steps, where there are none: 1 / variance of a price
        self._step = 0.0  # seconds of the last steps, about
        self._merge: float | None = None  # seconds of a merge, by the latest ones
        self._num_steps = 0

    def step_seconds(self, batch: Batch, merged: Adapter | None, context: float) -> float:
        """Never less than a tenth of what steps take."""
        return max(float(self._prices @ _terms(batch, merged, context)), self._step / 10, 1e-9)

    def merge_seconds(self, adapter: Adapter) -> float:
        return MERGE_STEPS * self._step if self._merge is None else self._merge

    def observe(self, batch: Batch, merged: Adapter | None, context: float, seconds: float) -> None:
        terms = _terms(batch, merged, context)
        self._num_steps += 1
        if self._num_steps == 1:
            self._step = seconds
            self._guess = (np.maximum(terms, LEAST) / seconds) ** 2
            shares = terms / self._guess
            self._prices = shares * seconds / float(shares @ terms)
        elif self._num_steps > len(LEAST):
            expected, most = float(self._prices @ terms), MAX_SURPRISE * self._step
            seconds = min(max(seconds, expected - most), expected + most)
        self._step += (seconds - self._step) / min(8, self._num_steps)
        weight = (NOISE * self._step) ** -2
        self._squares = KEPT * self._squares + weight * np.outer(terms, terms)
        self._sums = KEPT * self._sums + weight * seconds * terms
        self._settle()

    def observe_merge(self, adapter: Adapter, seconds: float) -> None:
        """Believe it by half or twice the price at most: one that was held up must not be the last there ever is."""
        expected = self.merge_seconds(adapter)
        self._merge = min(max(seconds, expected / 2), expected * 2) if expected else seconds

    def _settle(self) -> None:
        """Go to the prices of the least squared error: each term's best, the others as they are, in turns."""
        squares, sums, prices = self._squares.tolist(), self._sums.tolist(), self._prices.tolist()
        guess = self._guess.tolist()
        terms = range(len(prices))
        for _ in range(SWEEPS):
            for term in terms:
                row = squares[term]
                rest = sums[term] - sum([row[other] * prices[other] for other in terms]) + row[term] * prices[term]
                prices[term] = max(0.0, rest / (row[term] + guess[term]))
        self._prices = np.array(prices)


def _terms(batch: Batch, merged: Adapter | None, context: float) -> np.ndarray:
    work = work_of(batch, merged)
    return np.array(
        [1.0, work.rows, work.rows * context, float(work.adapter_ranks > 0), work.row_ranks, work.adapter_ranks]
    )
