"""Prices of decode steps that are learned from the steps themselves, for policies of modes."""

from __future__ import annotations

import numpy as np

from ...memory.adapters.adapter import Adapter
from .mode_policy import Batch, work_of

LEAST = np.array([1.0, 1.0, 256.0, 1.0, 8.0, 8.0])
"""Least amount of each term by which its share of a step is guessed at first: one of rows and ranks says little."""

NOISE = 0.05
"""Share of a step's time by which it differs from others of the same work; chosen."""

DRIFT = 1e-4
"""Share of the doubt of the beginning that comes back with every step, so that machines may change; chosen."""

MERGE_STEPS = 10.0
"""Steps that a merge is taken to cost before there has been one; chosen."""

MAX_SURPRISE = 0.5
"""Most share of its time by which a step changes prices: others may have had the processor in it."""


class LearnedPrices:
    """A linear model of a decode step's time, by a Kalman filter whose state is the price of each term.

    Terms: a step, a row, a token of KV, whether there is LoRA work, rank-rows computed, rank-rows read. At first the
    time of a step is shared out among its terms alike. That overrates LoRA, as often as not: merged mode is tried where
    it might help, and once it has been tried its price is known. No price is below 0: of terms that
    always come together, none is paid for by another.
    """

    def __init__(self) -> None:
        self._prices = np.zeros(len(LEAST))
        self._doubt = np.zeros((len(LEAST), len(LEAST)))
        self._first_doubt = np.zeros(len(LEAST))
        self._step = 0.0  # seconds of the last steps, about
        self._merge: float | None = None  # seconds of the latest merge
        self._num_steps = 0

    def step_seconds(self, batch: Batch, merged: Adapter | None, context: float) -> float:
        """Never less than a tenth of what steps take."""
        return max(float(self._prices @ _terms(batch, merged, context)), self._step / 10, 1e-9)

    def merge_seconds(self, adapter: Adapter) -> float:
        return MERGE_STEPS * self._step if self._merge is None else self._merge

    def observe(self, batch: Batch, merged: Adapter | None, context: float, seconds: float) -> None:
        terms = _terms(batch, merged, context)
        self._num_steps += 1
        usual = seconds if self._num_steps == 1 else min(seconds, 2 * self._step)
        self._step += (usual - self._step) / min(8, self._num_steps)
        if self._num_steps == 1:
            self._first_doubt = (seconds / np.maximum(terms, LEAST)) ** 2
            self._doubt = np.diag(self._first_doubt)
        surprise = seconds - float(self._prices @ terms)
        if self._num_steps > len(LEAST):
            most = MAX_SURPRISE * self._step
            surprise = min(max(surprise, -most), most)
        spread = self._doubt @ terms
        gain = spread / (float(terms @ spread) + (NOISE * seconds) ** 2)
        self._prices = np.maximum(0.0, self._prices + gain * surprise)
        self._doubt = self._doubt - np.outer(gain, spread)
        room = np.maximum(0.0, self._first_doubt - self._doubt.diagonal())
        self._doubt[np.diag_indices_from(self._doubt)] += np.minimum(room, DRIFT * self._first_doubt)

    def observe_merge(self, adapter: Adapter, seconds: float) -> None:
        self._merge = seconds


def _terms(batch: Batch, merged: Adapter | None, context: float) -> np.ndarray:
    work = work_of(batch, merged)
    return np.array(
        [1.0, work.rows, work.rows * context, float(work.adapter_ranks > 0), work.row_ranks, work.adapter_ranks]
    )
