"""Costs of a step beside its rows: all-reduces, LoRA on the CPU, and KV that was swapped out."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ...core.costs.models import CostModel
from ...core.requests.types import ScheduledRow, StepPlan
from ...core.scheduling.policies import VictimPolicy
from .link import Link, Urgency

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ...core.requests.request import Request


class Charges:
    """Charges for the operations that a replica's plans imply, by the cost model's terms.

    A term that the profile doesn't have is not charged, and what it prices is not done.
    """

    def __init__(
        self, costs: CostModel, link: Link, *, kv_token_bytes: int, hidden_bytes: int, num_layers: int, degree: int = 1
    ) -> None:
        """kv_token_bytes: of a token's KV. hidden_bytes: of a token's hidden state. degree: of tensor parallelism, for
        which the profile's steps were measured; only the all-reduces come on top.
        """
        self._costs = costs
        self._link = link
        self._kv_token_bytes = kv_token_bytes
        self._hidden_bytes = hidden_bytes
        self._num_layers = num_layers
        self._degree = degree
        self._swapped: dict[str, int] = {}  # tokens whose KV is in host memory
        self.num_assisted = 0
        self.num_swapped_tokens = 0  # out

    @property
    def is_idle(self) -> bool:
        """True if no plan costs anything more than its rows."""
        return self._degree == 1 and not self._swapped

    def work(self, plan: StepPlan) -> StepPlan:
        """Return the plan as it is computed: without what comes back from host memory."""
        if not self._swapped:
            return plan
        rows = [self._without_swapped(row) for row in plan.rows]
        rows.sort(key=lambda row: len(row.tokens) == 1)  # chunks come first
        return StepPlan(plan.step_id, rows, plan.adapters, plan.bucket, plan.merged)

    def each_step(self, plan: StepPlan) -> float:
        """Seconds of the all-reduces: two a layer, after attention and MLP. What else is on the link waits for them."""
        cost = self._costs.all_reduce
        if self._degree == 1 or cost is None:
            return 0.0
        seconds = 2 * self._num_layers * cost.seconds(plan.num_tokens * self._hidden_bytes, self._degree)
        if self._link.is_busy:
            self._link.send(seconds, Urgency.ALL_REDUCE)
        return seconds

    def once(self, plan: StepPlan, now: float) -> float:
        """Seconds that this step alone takes longer, for KV that comes back."""
        seconds = 0.0
        back = sum(self._num_back(row) for row in plan.rows) if self._swapped else 0
        if back:
            sending = self._link.send(self._costs.swap_seconds(back * self._kv_token_bytes), Urgency.SWAP)
            seconds += sending.end - now
            for row in plan.rows:
                if row.kv_len > self._swapped.get(row.request_id, row.kv_len):
                    del self._swapped[row.request_id]
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

    def swap_out(self, request: Request) -> None:
        """A running request is about to be preempted: its KV goes to host memory, behind which no step waits."""
        tokens = request.num_computed_tokens
        if tokens:
            self._link.send(self._costs.swap_seconds(tokens * self._kv_token_bytes), Urgency.SWAP)
            self._swapped[request.id] = tokens
            self.num_swapped_tokens += tokens

    def forget(self, request_id: str) -> None:
        """A request has ended; its KV in host memory is given up."""
        self._swapped.pop(request_id, None)

    def _num_back(self, row: ScheduledRow) -> int:
        """Tokens of a row whose KV is in host memory, but for its last one, whose logits are wanted."""
        return max(0, min(self._swapped.get(row.request_id, 0), row.kv_len - 1) - row.start)

    def _without_swapped(self, row: ScheduledRow) -> ScheduledRow:
        back = self._num_back(row)
        return replace(row, start=row.start + back, tokens=row.tokens[back:]) if back else row


class Swapping(VictimPolicy):
    """Another policy's victim, whose KV is swapped out and comes back instead of being computed again."""

    def __init__(self, policy: VictimPolicy, charges: Charges) -> None:
        self._policy = policy
        self._charges = charges

    def choose(self, running: Sequence[Request]) -> Request:
        victim = self._policy.choose(running)
        self._charges.swap_out(victim)
        return victim
