"""dLoRA's policy of modes: dynamic batching, adaptive thresholds and credits (§4.2 and §A.1, Algorithms 1 to 3).

Numbers that the paper leaves open are from the authors' code (LLMServe/dLoRA-artifact, vllm/core/scheduler.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary

from ...memory.adapters.adapter import Adapter
from .mode_policy import Batch, ModeChoice, ModePolicy, ModePrices, ModeState

ALPHA = math.nextafter(1.0, 0.0)
"""Threshold of Algorithm 1 to begin with: the artifact's 1.0, which it compares with ≥ where Algorithm 1 has >."""

BETA = 0.015 / 0.027
"""The other one to begin with: the artifact's time of a merged step over that of an unmerged one, "from llama-7b"."""

GAMMA_DEC, GAMMA_MUL = 0.05, 1.1
"""Steps of Algorithm 2: the artifact's aimd_add and aimd_mul."""

PERIOD = 100
"""Steps after which thresholds are tuned anew if nothing else changes; chosen, as no document says."""

INITIAL_CREDIT, STARVE_CREDIT, NORMAL_CREDIT = 70_000.0, 80_000.0, 75_000.0
"""Initial credit, T_starve and T_normal: the artifact's for 8 adapters. A whole displaced batch moves 1, so that an
adapter starves after 10,000 steps in which others had all of its rows: in no experiment of the paper's length.
"""


class Batching(Protocol):
    """A policy that can be held to a set of adapters, L of Algorithm 1."""

    @property
    def prices(self) -> ModePrices | None: ...

    def choose(self, state: ModeState, legal: Collection[Adapter] | None = None) -> ModeChoice: ...


class DynamicBatching(ModePolicy):
    """Algorithm 1: merged mode while one adapter has enough requests, compared with first come, first served.

    alpha: α_switch, above which |R_merge| / |B_fcfs| makes it merge. beta: β_switch, below which it unmerges.
    type: S.type in merged mode, None in unmerged mode, S.state.
    """

    def __init__(self, alpha: float = ALPHA, beta: float = BETA) -> None:
        self.alpha = alpha
        self.beta = beta
        self.type: Adapter | None = None

    def choose(self, state: ModeState, legal: Collection[Adapter] | None = None) -> ModeChoice:
        legal = state.eligible if legal is None else legal
        num_fcfs = sum(state.fcfs.values())
        if self.type is None:
            most = most_requested(state.requests, legal)
            if most is None or state.requests.get(most, 0) <= self.alpha * num_fcfs:
                return ModeChoice()
            self.type = most
        elif state.requests.get(self.type, 0) < self.beta * num_fcfs or self.type not in legal:
            self.type = None
            return ModeChoice()
        return ModeChoice.alone(self.type)


def most_requested(requests: Batch, legal: Collection[Adapter]) -> Adapter | None:
    """Return R_merge's adapter of Algorithm 1, line 7: of `legal` the one with most requests, None for none."""
    return max(legal, key=lambda adapter: (requests.get(adapter, 0), -adapter.version), default=None)


class Iteration(NamedTuple):
    """Step of a period: |B_i| and IterationTime(B_i) of the merged batch, |B'_i| and its time of the B_fcfs batch."""

    merged: int
    merged_seconds: float
    fcfs: int
    fcfs_seconds: float


def tuned(threshold: float, prefers_switch: bool) -> float:
    """Return α_switch after a period: lower by γ_dec where switching would have been better, else γ_mul as high."""
    return threshold - GAMMA_DEC if prefers_switch else threshold * GAMMA_MUL


def throughputs(period: Sequence[Iteration], merge_seconds: float, unmerge_seconds: float) -> tuple[float, float]:
    """Return T_merge and T_unmerge of Algorithm 2, lines 4 and 5: requests a second, each with its switch, t_M."""
    merged = sum(each.merged for each in period) / (sum(each.merged_seconds for each in period) + merge_seconds)
    fcfs = sum(each.fcfs for each in period) / (sum(each.fcfs_seconds for each in period) + unmerge_seconds)
    return merged, fcfs


class AdaptiveThresholds(ModePolicy):
    """Algorithm 2: tunes the thresholds of Algorithm 1 by the throughput of the past period in either mode.

    A period ends when the mode changes, when another adapter has most requests, or after `PERIOD` steps. The paper
    leaves β_switch out as "similar": it rises by γ_dec where unmerged mode would have been better, switch included, and
    else falls by γ_mul; as in the artifact neither threshold passes the other by an addition.

    To the letter α_switch has no upper bound: it is multiplied after every period of mixed adapters, and nothing but a
    period in which merging would have paid lowers it. `ArtifactThresholds` is the authors' own reading.
    """

    def __init__(self, batching: DynamicBatching, prices: ModePrices, period: int = PERIOD) -> None:
        self.batching = batching
        self.prices = self._prices = prices
        self._length = period
        self._period: list[Iteration] = []
        self._of: tuple[Adapter | None, Adapter | None] = None, None  # S.type and R_merge's adapter in the period

    def choose(self, state: ModeState, legal: Collection[Adapter] | None = None) -> ModeChoice:
        legal = state.eligible if legal is None else legal
        batching = self.batching
        choice = batching.choose(state, legal)
        now = batching.type, batching.type or most_requested(state.requests, legal)
        if self._period and self._is_over(*now):
            self._tune(*self._of)
            self._period = []
        if now[1] is not None:
            self._period.append(self._iteration(state, now[1]))
        self._of = now
        return choice

    def _is_over(self, merged: Adapter | None, candidate: Adapter | None) -> bool:
        return (merged, candidate) != self._of or len(self._period) == self._length

    def _iteration(self, state: ModeState, candidate: Adapter) -> Iteration:
        count = min(state.requests.get(candidate, 0), state.max_batch)
        merged = self._prices.step_seconds({candidate: count}, candidate, state.context)
        fcfs = self._prices.step_seconds(state.fcfs, None, state.context)
        return Iteration(count, merged, sum(state.fcfs.values()), fcfs)

    def _tune(self, merged: Adapter | None, candidate: Adapter | None) -> None:
        switch = 0.0 if candidate is None else self._prices.merge_seconds(candidate)
        if merged is None:
            self._tune_alpha(*throughputs(self._period, switch, 0.0))
        else:
            self._tune_beta(*throughputs(self._period, 0.0, switch))

    def _tune_alpha(self, merging: float, unmerged: float) -> None:
        batching = self.batching
        alpha = tuned(batching.alpha, merging > unmerged)
        batching.alpha = alpha if alpha > batching.beta else batching.alpha

    def _tune_beta(self, merging: float, unmerged: float) -> None:
        batching = self.batching
        if unmerged <= merging:
            batching.beta /= GAMMA_MUL
        elif batching.beta + GAMMA_DEC < batching.alpha:
            batching.beta += GAMMA_DEC


class ArtifactThresholds(AdaptiveThresholds):
    """Algorithm 2 as the authors' code has it (`_adjust_merge_threshold`): thresholds are tuned at mode switches only.

    A period is all steps between two switches. The end of merged mode tunes α_switch, that of unmerged mode β_switch. A
    switch is charged to the mode that the period was in and, in unmerged mode, to merged mode whenever another adapter
    has most requests. Step times are the prices', where the code has constants of one GPU.
    """

    def _is_over(self, merged: Adapter | None, candidate: Adapter | None) -> bool:
        return merged is not self._of[0]

    def _iteration(self, state: ModeState, candidate: Adapter) -> Iteration:
        found = super()._iteration(state, candidate)
        if self.batching.type is not None or (self._period and candidate is self._of[1]):
            return found
        return found._replace(merged_seconds=found.merged_seconds + self._prices.merge_seconds(candidate))

    def _tune(self, merged: Adapter | None, candidate: Adapter | None) -> None:
        switch = 0.0 if candidate is None else self._prices.merge_seconds(candidate)
        if merged is None:
            self._tune_beta(*throughputs(self._period, 0.0, switch))
        else:
            self._tune_alpha(*throughputs(self._period, switch, 0.0))


@dataclass(eq=False)
class _Balance:
    """Credit of an adapter, or of the base model, and whether it starves."""

    credit: float
    is_starving: bool = False


class Credits(ModePolicy):
    """Algorithm 3: adapters served out of turn pay credit to the adapters that they displace.

    An adapter starves once its credit is above T_starve, and until it is below T_normal; while any adapter starves,
    only starving ones are served. An adapter without the credit for being served alone is not merged.
    """

    def __init__(
        self,
        batching: Batching,
        initial: float = INITIAL_CREDIT,
        starve: float = STARVE_CREDIT,
        normal: float = NORMAL_CREDIT,
    ) -> None:
        self._batching = batching
        self.prices = batching.prices
        self._starve, self._normal = starve, normal
        self._initial = initial
        self._base = _Balance(initial)
        self._balances: WeakKeyDictionary[Adapter, _Balance] = WeakKeyDictionary()

    def credit(self, adapter: Adapter | None) -> float:
        """Return an adapter's credit, or the base model's."""
        return self._balance(adapter).credit

    def choose(self, state: ModeState) -> ModeChoice:
        starving = [adapter for adapter in state.requests if self._starves(adapter)]
        if starving:
            self._transfer(first(state.requests, starving, state.max_batch), state)
            merged = state.merged if starving == [state.merged] else None
            return ModeChoice(merged, frozenset(starving))
        legal = [each for each in state.eligible if self.credit(each) >= self._price(state, each)]
        choice = self._batching.choose(state, legal)
        if choice.only is not None:
            self._transfer(first(state.requests, choice.only, state.max_batch), state)
        return choice

    def _starves(self, adapter: Adapter | None) -> bool:
        balance = self._balance(adapter)
        if balance.is_starving and balance.credit < self._normal:
            balance.is_starving = False
        elif balance.credit > self._starve:
            balance.is_starving = True
        return balance.is_starving

    def _balance(self, adapter: Adapter | None) -> _Balance:
        if adapter is None:
            return self._base
        balance = self._balances.get(adapter)
        if balance is None:
            balance = self._balances[adapter] = _Balance(self._initial)
        return balance

    def _price(self, state: ModeState, adapter: Adapter) -> float:
        """Return the credit that serving an adapter alone would move."""
        return sum(waived(first(state.requests, (adapter,), state.max_batch), state.fcfs).values()) / state.max_batch

    def _transfer(self, batch: Batch, state: ModeState) -> None:
        """Move credit from the served adapters to the adapters next in turn: `transfer_credit`."""
        gains = waived(batch, state.fcfs)
        total, rows = sum(gains.values()) / state.max_batch, sum(batch.values())
        if not rows:
            return
        for adapter, count in gains.items():
            self._balance(adapter).credit += count / state.max_batch
        for adapter, count in batch.items():
            self._balance(adapter).credit -= total * count / rows


def waived(batch: Batch, fcfs: Batch) -> dict[Adapter | None, int]:
    """Return how many requests of each adapter were next in turn and are not in the batch."""
    return {adapter: count - batch.get(adapter, 0) for adapter, count in fcfs.items() if count > batch.get(adapter, 0)}


def first(requests: Batch, adapters: Collection[Adapter | None], most: int) -> dict[Adapter | None, int]:
    """Return a batch of `most` requests at most of these adapters, which take turns by their order."""
    batch: dict[Adapter | None, int] = {}
    for adapter in adapters:
        if count := min(requests.get(adapter, 0), most):
            batch[adapter] = count
            most -= count
    return batch
