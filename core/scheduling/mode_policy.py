"""Policy by which steps have an adapter in their weights, and whose requests they run (dLoRA §4.2): its seam."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...memory.adapters.adapter import Adapter

#: Numbers of requests by adapter; None: of the base model.
Batch = Mapping[Adapter | None, int]


@dataclass(frozen=True, slots=True)
class ModeState:
    """State that a mode is chosen by, before each step.

    requests: waiting and running ones, the paper's R. fcfs: those of them that run or came first, as many as a step has
    rows: B_fcfs. eligible: adapters with requests that may be merged now: L. max_batch: rows of a
    step. context: tokens in the KV cache of a running request, the mean. merged: the adapter in the weights that steps
    use. shadowed: whose merged weights there are, so that merging it is a switch, or are being made, if `is_under_way`:
    `share_made` of them is there.
    step_seconds: of the last decode step. may_leave_out: a step may leave some requests out.
    running: requests with a row.
    beginning: waiting requests that may be admitted beside the requests that the mode excludes, which keep their pages.
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
        """Return the rows of a step that leaves all others out: those that run, and those that may begin."""
        return min(self.requests.get(adapter, 0), self.max_batch, self.running.get(adapter, 0) + self.beginning)


class ModeChoice(NamedTuple):
    """A choice for the next step. merged: the adapter that steps are to have in their weights; None: none.

    only: adapters, or the base model, whose requests alone run; None: all. It counts once steps are in the mode.
    """

    merged: Adapter | None = None
    only: frozenset[Adapter | None] | None = None

    @classmethod
    def alone(cls, adapter: Adapter) -> ModeChoice:
        """Return merged inference as dLoRA has it: the adapter's requests alone."""
        return cls(adapter, frozenset((adapter,)))


class ModePolicy(Protocol):
    """Chooses between unmerged mode and merged mode with one adapter, and may leave the others' requests out of steps.

    An adapter that can't be merged, or not yet, is served unmerged; until its merged weights are made, so is one that
    can, beside all others.
    """

    def choose(self, state: ModeState) -> ModeChoice: ...


class ModePrices(Protocol):
    """Seconds by which policies compare modes."""

    def step_seconds(self, batch: Batch, merged: Adapter | None, context: float) -> float:
        """Return the time of a decode step of so many requests by adapter, each with `context` tokens of KV."""
        ...

    def merge_seconds(self, adapter: Adapter) -> float:
        """Return what making an adapter's merged weights takes, in pauses between steps."""
        ...

    def observe(self, batch: Batch, merged: Adapter | None, context: float, seconds: float) -> None:
        """A decode step took so long."""
        ...

    def observe_merge(self, adapter: Adapter, seconds: float) -> None:
        """Merged weights were made in so long, or will have been, by what is made of them so far."""
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
