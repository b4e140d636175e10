"""Costs of a replica's steps and transfers, which it learns as it runs and tells its fronts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ...core.costs.models import CostModel, DiskCost, Kernel, StepCost, TransferCost
from ...core.merging.learned_prices import LearnedPrices
from ...core.merging.modes import batch_of, context_of

if TYPE_CHECKING:
    from ...core.engine import Engine
    from ...core.requests.types import StepPlan

_DECODE_TERMS = ("base", "per_row", "per_kv_token", "lora", "per_rank", "per_adapter_rank")
"""Terms of `StepCost`, in the order of `LearnedPrices.terms`."""

_WEIGHT = 0.2
"""Share by which a prefill step moves the price of a prompt's token, as the engine's other estimates move."""


class LearnedCosts:
    """Prices of an engine's decode steps, learned from one step for each report: more would slow down all of them."""

    def __init__(self) -> None:
        self._prices = LearnedPrices()
        self._last: StepPlan | None = None
        self._per_token: float | None = None  # of a prompt
        self._last_prefill: StepPlan | None = None

    def observe(self, engine: Engine) -> dict[str, float]:
        """Learn from the last decode step, on the engine's thread, and return what is known by now.

        That is terms of `StepCost`, and seconds per byte to read an adapter (disk) and to copy it from the host (link).
        """
        plan, seconds = engine.last_decode
        if plan is not None and plan is not self._last:
            self._last = plan
            self._prices.observe(batch_of(plan), plan.merged, context_of(plan), seconds)
        if self._last is None:
            return {}
        self._observe_prefill(*engine.last_prefill)
        terms = dict(zip(_DECODE_TERMS, self._prices.terms, strict=True))
        per_token = engine.costs.prefix_page / engine.block_tokens if self._per_token is None else self._per_token
        page = engine.executor.layout.page_bytes
        return {
            **terms, "per_token": per_token, "per_row": max(0.0, terms["per_row"] - per_token),  # a row has a token
            "disk": engine.costs.disk_adapter_page / page, "link": engine.costs.host_adapter_page / page,
        }  # fmt: skip

    def _observe_prefill(self, plan: StepPlan | None, seconds: float) -> None:
        """Learn what a prompt's token adds to a decode step of the same rows, whose own price is known."""
        if plan is None or plan is self._last_prefill:
            return
        self._last_prefill = plan
        seconds -= self._prices.step_seconds(batch_of(plan), plan.merged, context_of(plan))
        found = max(0.0, seconds) / (plan.num_tokens - len(plan.rows))
        self._per_token = found if self._per_token is None else self._per_token + _WEIGHT * (found - self._per_token)


def mean_costs(told: Sequence[Mapping[str, float]]) -> CostModel:
    """Return the mean of the costs that replicas have reported, at least one: replicas are taken to be alike."""

    def mean(name: str) -> float:
        return sum(one.get(name, 0.0) for one in told) / len(told)

    step = StepCost(**{name: mean(name) for name in (*_DECODE_TERMS, "per_token")})
    return CostModel(Kernel.SGMV, step, DiskCost(per_byte=mean("disk")), TransferCost(per_byte=mean("link")))
