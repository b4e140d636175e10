"""Costs of a step beside its rows: adapters on their way, and LoRA on the CPU."""

from __future__ import annotations

from typing import Literal

from ...core.cold_start import ColdStart, ColdStarts, stalls
from ...core.costs.models import CostModel
from ...core.requests.types import StepPlan
from .adapters import SimTransfer
from .link import Link, Urgency

When = Literal["never", "always", "chosen"]


class Charges:
    """Charges for the operations that a replica's plans imply, by the cost model's terms.

    A term that the profile doesn't have is not charged, and what it prices is not done.
    """

    def __init__(
        self,
        costs: CostModel,
        link: Link,
        *,
        num_layers: int,
        product_bytes: int = 0,
        assist: When = "chosen",
    ) -> None:
        """product_bytes: of a token's x·A·B in all layers. assist: when the CPU computes LoRA of adapters on their way,
        if the profile has its cost.
        """
        self._costs = costs
        self._link = link
        self._num_layers = num_layers
        self._product_bytes = product_bytes
        self._assist = assist
        self.starts = ColdStarts()

    def stall(self, plan: StepPlan, slot: int, transfer: SimTransfer, now: float, computing: float) -> float:
        """Return by how much a step that begins now, and takes `computing` for its layers otherwise, waits for an
        adapter on its way, or for the CPU, which computes x·A·B of layers that are not there (CaraServe §4).
        """
        cost, stall = self._costs.cpu_lora, transfer.stall(now, computing)
        if cost is None or stall <= 0:
            return stall
        tokens = sum(len(row.tokens) for row in plan.rows if row.slot == slot)
        returned = tokens * self._product_bytes * self._costs.link.per_byte
        arrival = transfer.arrival(now, self._num_layers)
        found = stalls(arrival, computing, cost.seconds(tokens, plan.adapters[slot].rank), returned)
        assists = self._assist == "always" or (self._assist == "chosen" and found.assist < stall)
        self.starts.count(ColdStart.ASSIST if assists else ColdStart.STREAM)
        chosen = found.assist if assists else stall
        self.starts.regret_seconds += chosen - min(stall, found.assist)
        if assists:
            self._link.send(returned * found.lent / self._num_layers, Urgency.STEP)
        return chosen
