"""Our mode policy: the mode with the highest predicted tokens a second, once the loss without it has paid for it."""

from __future__ import annotations

import math

from ...memory.adapters.adapter import Adapter
from ..config import EngineConfig
from .mode_policy import Batch, ModeChoice, ModePolicy, ModePrices, ModeState

MARGIN = 0.01
"""Share by which a mode's predicted rate must exceed the present one's; chosen, as predictions are less exact."""

EARNED = 2.0
"""Merge when the tokens lost without it reach this many times its cost. Chosen: requests come and go, and with 1 a
merge would serve requests already gone. So merging costs at most half of its expected gain.
"""

PROBE, MOST_PROBE = 64, 1024
"""Exploration: run all requests together once every `PROBE` steps of one adapter alone, so that the cost estimate stays
current. The interval doubles after each probe that changed nothing, up to `MOST_PROBE`. Chosen: the first costs at most
a hundredth.
"""


class FastestMode(ModePolicy):
    """Chooses among unmerged mode, merged mode with all requests, and merged mode with the merged adapter's alone.

    Modes with existing weights are compared step by step, by predicted tokens a second: switching between them is free.
    Merged weights are made when the tokens lost without them reach `EARNED` times the cost of making them. Ski-rental
    rule: within a constant factor of the offline optimum.
    """

    def __init__(self, prices: ModePrices) -> None:
        self.prices = self._prices = prices
        self._lost: dict[Adapter, float] = {}  # tokens lost without the merged weights of each
        self._earned = math.inf  # tokens, lost before the merge under way was begun
        self._num_alone, self._probe = 0, PROBE  # steps in a row, and after how many one has all requests

    def max_exclusion_seconds(self, config: EngineConfig) -> float:
        """Return the bound on overtaking, too: this policy excludes requests for speed alone."""
        return min(config.max_turn_seconds, config.max_overtake_seconds)

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
        """Return the highest rate (tokens a second) with an adapter (None: none) in the weights, and its choice."""
        together = self._rate(state, state.fcfs, merged)
        if merged is None or not state.may_leave_out:
            return together, ModeChoice(merged)
        count = state.alone(merged)
        alone = self._rate(state, {merged: count}, merged) if count else 0.0
        if alone > together * (1 + MARGIN):
            return alone, ModeChoice.alone(merged)
        return together, ModeChoice(merged)

    def _rate(self, state: ModeState, batch: Batch, merged: Adapter | None) -> float:
        return sum(batch.values()) / self._prices.step_seconds(batch, merged, state.context)

    def _wanted(self, state: ModeState, rate: float) -> Adapter | None:
        """Return an adapter for which enough has been lost without merged weights. rate: without them."""
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
        """Make the rest of merged weights, unless it costs more than was lost without them.

        Before the first merge its cost is a guess; the first matrices give the real one. A merge begun on too low a
        guess is cancelled, and begun again when enough has been lost to pay for it.
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
