"""Costs of a step beside its rows: merging, all-reduces, and LoRA on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...core.costs.models import CostModel
from ...core.costs.work import StepWork
from ...core.requests.types import BASE_SLOT, StepPlan
from .link import Link, Urgency

if TYPE_CHECKING:
    from ...memory.adapters.adapter import Adapter


class Charges:
    """Charges for the operations that a replica's plans imply, by the cost model's terms.

    A term that the profile doesn't have is not charged, and what it prices is not done.
    """

    def __init__(self, costs: CostModel, link: Link, *, hidden_bytes: int, num_layers: int, degree: int = 1) -> None:
        """hidden_bytes: of a token's hidden state. degree: of tensor parallelism, for which the profile's steps were
        measured; only the all-reduces come on top.
        """
        self._costs = costs
        self._link = link
        self._hidden_bytes = hidden_bytes
        self._num_layers = num_layers
        self._degree = degree
        self._merged: Adapter | None = None  # in the copy of the weights
        self._merge_due = 0.0
        self.num_merges = 0
        self.num_assisted = 0

    @property
    def is_idle(self) -> bool:
        """True if no plan costs anything more than its rows."""
        return self._degree == 1

    def merge(self, plan: StepPlan, adapter: Adapter | None) -> None:
        """Run a plan with one of its adapters merged (dLoRA §4), or none. Another one than last time is written first.

        Raises ValueError where the profile has no merge cost.
        """
        if adapter is None:
            return
        if self._costs.merge is None:
            raise ValueError("the profile has no merge cost, so nothing can be merged; set terms merge.base")
        plan.merged = adapter
        if adapter is not self._merged:
            self._merged = adapter
            self._merge_due = self._costs.merge.seconds(adapter.rank)
            self.num_merges += 1

    def merged_seconds(self, plan: StepPlan) -> float:
        """Seconds of a merged plan: the merged adapter's rows are the base model's; the others take away its part and
        add their own.
        """
        merged = self._merged
        assert merged is not None
        slot = plan.adapters.index(merged) if merged in plan.adapters else None
        others = [each for index, each in enumerate(plan.adapters) if index != slot]
        places = {plan.adapters.index(each): place for place, each in enumerate(others)}
        rows = [replace(row, slot=places.get(row.slot, BASE_SLOT)) for row in plan.rows]
        work = StepWork.of(StepPlan(plan.step_id, rows, others, plan.bucket), self._costs.kernel)
        apart = [len(row.tokens) for row in plan.rows if row.slot != slot]
        if apart:
            work.row_ranks += len(apart) * merged.rank
            work.token_ranks += sum(apart) * merged.rank
            work.adapter_ranks += merged.rank
        return work.seconds(self._costs.step)

    def each_step(self, plan: StepPlan) -> float:
        """Seconds of the all-reduces: two a layer, after attention and MLP. What else is on the link waits for them."""
        cost = self._costs.all_reduce
        if self._degree == 1 or cost is None:
            return 0.0
        seconds = 2 * self._num_layers * cost.seconds(plan.num_tokens * self._hidden_bytes, self._degree)
        if self._link.is_busy:
            self._link.send(seconds, Urgency.ALL_REDUCE)
        return seconds

    def once(self) -> float:
        """Seconds that the next step alone takes longer: a merge."""
        seconds, self._merge_due = self._merge_due, 0.0
        return seconds

    def assisted(self, plan: StepPlan, slot: int, stall: float) -> float:
        """Return the stall for an adapter that is being loaded, or what it takes to compute x·A·B on the CPU instead
        (CaraServe §4), if that is less.
        """
        cost = self._costs.cpu_lora
        if cost is None or stall <= 0:
            return stall
        tokens = sum(len(row.tokens) for row in plan.rows if row.slot == slot)
        seconds = cost.seconds(tokens, plan.adapters[slot].rank)
        if seconds >= stall:
            return stall
        self.num_assisted += 1
        return seconds
