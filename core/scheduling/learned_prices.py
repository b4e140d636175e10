"""Prices of decode steps that are learned from the steps themselves, for policies of modes."""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

from ...memory.adapters.adapter import Adapter
from .mode_policy import Batch, work_of

LEAST = (1.0, 1.0, 256.0, 1.0, 8.0, 8.0)
"""Least amount of each term by which its share of a step is guessed at first: one of rows and ranks says little."""

NOISE = 0.05
"""Share of a step's time by which it differs from others of the same work; chosen."""

KEPT = 0.999
"""Share of what is known that each step leaves, so that machines may change; chosen: a thousand steps count."""

MERGE_STEPS = 10.0
"""Steps that a merge is taken to cost before there has been one; chosen."""

MAX_SURPRISE = 0.2
"""Most share of its time by which a step that took longer changes prices: others may have had the processor in it.
One that took less is believed: nothing makes a step shorter than its work.
"""

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
        self._prices = [0.0] * count
        self._squares = [[0.0] * count for _ in LEAST]  # of the terms of all steps, and their products with the seconds
        self._sums = [0.0] * count
        self._guess = [0.0] * count  # what takes the place of steps, where there are none: 1 / variance of a price
        self._step = 0.0  # seconds of the last steps, about
        self._merge: float | None = None  # seconds of a merge, by the latest ones
        self._num_steps = 0

    def step_seconds(self, batch: Batch, merged: Adapter | None, context: float) -> float:
        """Never less than a tenth of what steps take."""
        return max(_product(self._prices, _terms(batch, merged, context)), self._step / 10, 1e-9)

    def merge_seconds(self, adapter: Adapter) -> float:
        return MERGE_STEPS * self._step if self._merge is None else self._merge

    def observe(self, batch: Batch, merged: Adapter | None, context: float, seconds: float) -> None:
        terms = _terms(batch, merged, context)
        self._num_steps += 1
        if self._num_steps == 1:
            self._step = seconds
            self._guess = [(max(term, least) / seconds) ** 2 for term, least in zip(terms, LEAST, strict=True)]
            shares = [term / guess for term, guess in zip(terms, self._guess, strict=True)]
            total = _product(shares, terms)
            self._prices = [share * seconds / total for share in shares]
        elif self._num_steps > len(LEAST):
            expected, most = _product(self._prices, terms), MAX_SURPRISE * self._step
            seconds = min(seconds, expected + most)
        self._step += (seconds - self._step) / min(8, self._num_steps)
        weight = (NOISE * self._step) ** -2
        for row, one in zip(self._squares, terms, strict=True):
            row[:] = [KEPT * square + weight * (one * other) for square, other in zip(row, terms, strict=True)]
        share = weight * seconds
        self._sums = [KEPT * total + share * term for total, term in zip(self._sums, terms, strict=True)]
        self._settle()

    def observe_merge(self, adapter: Adapter, seconds: float) -> None:
        """Believe it by half or twice the price at most: one that was held up must not be the last there ever is."""
        expected = self.merge_seconds(adapter)
        self._merge = min(max(seconds, expected / 2), expected * 2) if expected else seconds

    def _settle(self) -> None:
        """Go to the prices of the least squared error: each term's best, the others as they are, in turns."""
        squares, sums, prices, guess = self._squares, self._sums, self._prices, self._guess
        for _ in range(SWEEPS):
            for term, row in enumerate(squares):
                rest = sums[term] - _product(row, prices) + row[term] * prices[term]
                prices[term] = max(0.0, rest / (row[term] + guess[term]))


def _terms(batch: Batch, merged: Adapter | None, context: float) -> tuple[float, ...]:
    work = work_of(batch, merged)
    return 1.0, work.rows, work.rows * context, float(work.adapter_ranks > 0), work.row_ranks, work.adapter_ranks


def _product(prices: Sequence[float], amounts: Sequence[float]) -> float:
    return sum(map(mul, prices, amounts))
