"""Our policy of modes: whatever is predicted to compute most tokens a second, once it has earned what it costs."""

from __future__ import annotations

import math

from ...memory.adapters.adapter import Adapter
from .mode_policy import Batch, ModeChoice, ModePrices, ModeState

MARGIN = 0.01
"""Share by which a mode must promise more than the present one; chosen: predictions are not that good."""

EARNED = 2.0
"""Costs of a merge that must have been lost without it; chosen: requests come and go, and with 1 what the last ones
missed is merged for the next. So merging takes half, at most, of what it is meant to gain.
"""

PROBE, MOST_PROBE = 64, 1024
"""Steps of one adapter alone before one with all requests, which tells whether its price still holds: what is never run
is never known to have become cheaper, or to have been cheaper all along. Twice as many after each that changed nothing,
at most `MOST_PROBE`. Chosen: the first costs a hundredth at most.
"""


class FastestMode:
    """Chooses among unmerged mode, merged mode of everybody, and of the merged adapter's requests alone.

    What is there is chosen by predicted tokens a second, step by step, as switching to it and back is free. Merged
    weights are made when what was lost without them, in tokens, has come to `EARNED` times what making them costs:
    whoever rents until then and buys pays a fixed multiple, at most, of what he would have paid had he known how long
    it lasts.
    """

    def __init__(self, prices: ModePrices) -> None:
        self._prices = prices
        self._lost: dict[Adapter, float] = {}  # tokens, without the merged weights of each
        self._earned = math.inf  # tokens, lost before the merge under way was begun
        self._num_alone, self._probe = 0, PROBE  # steps in a row, and after how many one has all requests

    def choose(self, state: ModeState) -> ModeChoice:
        if state.shadowed is not None and state.is_under_way:
            return self._go_on(state, state.shadowed)
        if not state.fcfs:
            return ModeChoice(state.merged)
        rate, choice = self._best(state, None)
        if state.shadowed is not None:
            merged = self._best(state, state.shadowed)
            rate, choice = max((rate, choice), merged, key=lambda found: self._weighed(found, state))
        wanted = self._wanted(state, rate)
        if wanted is not None:
            return ModeChoice(wanted)
        if choice.only is None:
            self._num_alone, self._probe = 0, PROBE
        elif self._num_alone == self._probe:
            self._num_alone, self._probe = 0, min(2 * self._probe, MOST_PROBE)
            return ModeChoice(choice.merged)
        else:
            self._num_alone += 1
        return choice

    def _weighed(self, found: tuple[float, ModeChoice], state: ModeState) -> float:
        """Return a rate; that of the present mode counts a little more."""
        rate, choice = found
        return rate * (1 + MARGIN) if choice.merged is state.merged else rate

    def _best(self, state: ModeState, merged: Adapter | None) -> tuple[float, ModeChoice]:
        """Return the most tokens a second with an adapter in the weights, None for none, and what is to run for it."""
        everybody = self._rate(state, state.fcfs, merged)
        if merged is None or not state.may_leave_out:
            return everybody, ModeChoice(merged)
        count = state.alone(merged)
        alone = self._rate(state, {merged: count}, merged) if count else 0.0
        if alone > everybody * (1 + MARGIN):
            return alone, ModeChoice.alone(merged)
        return everybody, ModeChoice(merged)

    def _rate(self, state: ModeState, batch: Batch, merged: Adapter | None) -> float:
        return sum(batch.values()) / self._prices.step_seconds(batch, merged, state.context)

    def _wanted(self, state: ModeState, rate: float) -> Adapter | None:
        """Return an adapter whose merged weights have been missed for long enough. rate: without them."""
        lost = {}
        for adapter in self._candidates(state):
            gain = self._best(state, adapter)[0] - rate * (1 + MARGIN)
            tokens = max(0.0, self._lost.get(adapter, 0.0) + gain * state.step_seconds)
            if tokens > EARNED * self._prices.merge_seconds(adapter) * rate:
                self._lost, self._earned = {}, tokens
                return adapter
            if tokens:
                lost[adapter] = tokens
        self._lost = lost
        return None

    def _go_on(self, state: ModeState, adapter: Adapter) -> ModeChoice:
        """Make the rest of merged weights, unless it costs more than all that was lost without them.

        Their first matrices tell what they cost. Before there has been a merge that is a guess, and one that was too
        low must not take a whole merge: this one is begun again when enough has been lost for what it costs.
        """
        rest = self._prices.merge_seconds(adapter) * (1 - state.share_made)
        if not state.fcfs or self._earned >= rest * self._rate(state, state.fcfs, None):
            return ModeChoice(adapter)
        self._lost[adapter] = self._earned
        return ModeChoice(None)

    def _candidates(self, state: ModeState) -> list[Adapter]:
        """Return the adapters that may be worth merging: with most rows of a step, of its own or of first come, first
        served, and of equal ones with most requests; and with most work for its rows.
        """
        eligible = [adapter for adapter in state.eligible if adapter is not state.shadowed]
        if not eligible:
            return []
        first, requests = state.fcfs, state.requests

        def rows(adapter: Adapter) -> tuple[int, int, int]:
            own = state.alone(adapter) if state.may_leave_out else first.get(adapter, 0)
            return own, requests.get(adapter, 0), -adapter.version

        def work(adapter: Adapter) -> tuple[int, int]:
            return first.get(adapter, 0) * adapter.rank, -adapter.version

        return list(dict.fromkeys([max(eligible, key=rows), max(eligible, key=work)]))
