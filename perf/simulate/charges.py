"""Costs of a step beside its rows: all-reduces, and LoRA on the CPU."""

from __future__ import annotations

from ...core.costs.models import CostModel
from ...core.requests.types import StepPlan
from .link import Link, Urgency


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
        self.num_assisted = 0

    @property
    def is_idle(self) -> bool:
        """True if no plan costs anything more than its rows."""
        return self._degree == 1

    def each_step(self, plan: StepPlan) -> float:
        """Seconds of the all-reduces: two a layer, after attention and MLP. What else is on the link waits for them."""
        cost = self._costs.all_reduce
        if self._degree == 1 or cost is None:
            return 0.0
        seconds = 2 * self._num_layers * cost.seconds(plan.num_tokens * self._hidden_bytes, self._degree)
        if self._link.is_busy:
            self._link.send(seconds, Urgency.ALL_REDUCE)
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
