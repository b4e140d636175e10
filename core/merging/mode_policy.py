"""Interface of mode policies: which adapter is merged into the weights, and which requests run (dLoRA §4.2).

Tests: tests/core/merging/test_dlora.py, tests/core/merging/test_fastest_mode.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ...memory.adapters.adapter import Adapter

if TYPE_CHECKING:
    from ..config import EngineConfig

#: Numbers of requests by adapter; None: of the base model.
Batch = Mapping[Adapter | None, int]


@dataclass(frozen=True, slots=True)
class ModeState:
    """Input of a mode policy, before each step.

    requests: all waiting and running requests, the paper's R. fcfs: the first `max_batch` of them, running ones first:
    B_fcfs. eligible: adapters with requests that may be merged now: L. max_batch: rows of a step. context: mean number
    of KV tokens of a running request. merged: the adapter merged into the weights in use. shadowed: the adapter of the
    shadow weights, so that merging it is a switch; while `is_under_way` they are being made, `share_made` of them so
    far. step_seconds: of the last decode step. may_leave_out: a step may exclude requests. running: requests with a
    row. beginning: waiting requests that may be admitted although the excluded requests keep their pages.
    """

    requests: Batch
    fcfs: Batch
    eligible: Collection[Adapter]
    max_batch: int
    context: float
    merged: Adapter | None = None
    shadowed: Adapter | None = None
    is_under_way: bool = False
    share_made: float = 0.0
    step_seconds: float = 0.0
    may_leave_out: bool = True
    running: Batch = field(default_factory=dict)
    beginning: int = 0

    def alone(self, adapter: Adapter) -> int:
        """Return the rows of a step that runs this adapter alone: its running requests, and the ones that may begin."""
        return min(self.requests.get(adapter, 0), self.max_batch, self.running.get(adapter, 0) + self.beginning)


class ModeChoice(NamedTuple):
    """A choice for the next step. merged: the adapter to merge into the weights; None: none.

    only: eligible adapters (None in it: the base model); None: all. Applied once steps are in the mode.
    """

    merged: Adapter | None = None
    only: frozenset[Adapter | None] | None = None

    @classmethod
    def alone(cls, adapter: Adapter) -> ModeChoice:
        """Return merged inference as dLoRA has it: the adapter's requests alone."""
        return cls(adapter, frozenset((adapter,)))


class ModePolicy(ABC):
    """Chooses between unmerged mode and merged mode with one adapter, and may exclude other requests from steps.

    An adapter is served unmerged, together with all others, if it can't be merged or until its merged weights are made.
    """

    prices: ModePrices | None = None
    """The costs by which it compares modes; they learn from steps. None if it compares none."""

    @abstractmethod
    def choose(self, state: ModeState) -> ModeChoice:
        """Return the mode of the next step."""

    def credit(self, adapter: Adapter | None) -> float | None:
        """Return the credit of an adapter, or of the base model; None if the policy keeps no credits."""
        return None

    def max_exclusion_seconds(self, config: EngineConfig) -> float:
        """Return the longest time that steps may exclude all requests of a tenant."""
        return config.max_turn_seconds


class ModePrices(Protocol):
    """Costs in seconds by which policies compare modes."""

    def step_seconds(self, batch: Batch, merged: Adapter | None, context: float) -> float:
        """Return the time of a decode step of so many requests by adapter, each with `context` tokens of KV."""
        ...

    def merge_seconds(self, adapter: Adapter) -> float:
        """Return the time between steps that making an adapter's merged weights takes."""
        ...

    def observe(self, batch: Batch, merged: Adapter | None, context: float, seconds: float) -> None:
        """Record the time of a decode step."""
        ...

    def observe_merge(self, adapter: Adapter, seconds: float) -> None:
        """Record the time of a merge; of one under way, extrapolated from the part made so far."""
        ...


class Work(NamedTuple):
    """LoRA work of a decode step. users: additions of an adapter's product to a row. row_ranks: the sum of their ranks.

    max_rank: the largest. adapter_ranks: the sum of the distinct adapters' ranks, which are read.
    """

    rows: int
    users: int
    row_ranks: int
    max_rank: int
    adapter_ranks: int


def work_of(batch: Batch, merged: Adapter | None) -> Work:
    """Count the work of a batch. Rows of the merged adapter pay nothing; the others take its part away again."""
    rows = users = row_ranks = max_rank = adapter_ranks = apart = 0
    for adapter, count in batch.items():
        rows += count
        if merged is not None:
            if adapter is merged:
                continue
            apart += count
        if adapter is not None and count:
            users += count
            row_ranks += count * adapter.rank
            adapter_ranks += adapter.rank
            max_rank = max(max_rank, adapter.rank)
    if merged is not None and apart:
        users += apart
        row_ranks += apart * merged.rank
        adapter_ranks += merged.rank
        max_rank = max(max_rank, merged.rank)
    return Work(rows, users, row_ranks, max_rank, adapter_ranks)
