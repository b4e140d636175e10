"""Prices of decode steps by a profile, for policies of modes."""

from __future__ import annotations

from ...core.costs.models import CostModel, StepWork
from ...core.merging.mode_policy import Batch, ModePrices, work_of
from ...memory.adapters.adapter import Adapter


class ProfilePrices(ModePrices):
    """Prices of a profile, which steps don't change."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def step_seconds(self, batch: Batch, merged: Adapter | None, context: float) -> float:
        """The engine's own time included, without padding."""
        costs, work = self._costs, work_of(batch, merged)
        ranks = costs.kernel.rank_work(work.users, work.row_ranks, work.max_rank)
        rows, longest = work.rows, round(context)
        step = StepWork(rows, rows, round(rows * context), longest, ranks, ranks, work.adapter_ranks)
        return costs.step.seconds(step) + costs.overhead.seconds(rows)

    def merge_seconds(self, adapter: Adapter) -> float:
        """0 where the profile has no merge cost."""
        return 0.0 if self._costs.merge is None else self._costs.merge.seconds(adapter.rank)

    def observe(self, batch: Batch, merged: Adapter | None, context: float, seconds: float) -> None:
        """Nothing is learned."""

    def observe_merge(self, adapter: Adapter, seconds: float) -> None:
        """Nothing is learned."""
