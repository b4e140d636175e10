"""Merging in simulations: merged mode without weights, prices of a profile, and dLoRA's strawman.

Tests: tests/perf/simulate/test_serving.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...core.costs.models import CostModel, MergeCost, StepWork
from ...core.merging.mode_policy import Batch, ModeChoice, ModePolicy, ModePrices, ModeState, work_of
from ...memory.adapters.adapter import Adapter
from ...memory.pages.layout import PageLayout
from ...memory.pages.projections import Projections


class SimShadow:
    """The executor's `ShadowBackend`: one matrix after another is paid for, each by its share of the elements."""

    def __init__(
        self, cost: MergeCost, layout: PageLayout, projections: Projections, spend: Callable[[float], None]
    ) -> None:
        """projections: of the model. spend: advances the clock."""
        self._cost = cost
        self._layout = layout
        self._projections = projections
        self._spend = spend
        self._left: list[float] = []  # seconds of the matrices still to be made
        self._seconds = 0.0  # of all matrices
        self.adapter: Adapter | None = None

    def sizes(self, adapter: Adapter) -> list[int]:
        """Return the pages of each matrix that an adapter changes."""
        elems = self._layout.page_bytes // self._layout.itemsize
        return [-(-size // elems) for size in self._elems(adapter)]

    def wished_runs(self, adapter: Adapter) -> None:
        """Any will do."""

    def begin(self, adapter: Adapter, runs: Sequence[range]) -> None:
        """Begin to make the matrices."""
        sizes = self._elems(adapter)
        seconds = self._cost.seconds(adapter.rank) / sum(sizes)
        self.adapter, self._left = adapter, [seconds * size for size in reversed(sizes)]
        self._seconds = sum(self._left)

    def advance(self, max_seconds: float) -> bool:
        """Spend the time of the next matrix, and of more while there is time; True when all are made."""
        spent = 0.0
        while self._left and (not spent or spent + self._left[-1] <= max_seconds):
            spent += self._left.pop()
        self._spend(spent)
        return not self._left

    @property
    def share_made(self) -> float:
        """Its share of the time."""
        return 1 - sum(self._left) / self._seconds if self._seconds else 0.0

    def drop(self) -> None:
        """Forget it."""
        self.adapter, self._left, self._seconds = None, [], 0.0

    def _elems(self, adapter: Adapter) -> list[int]:
        """Return the elements of each matrix, over all layers."""
        targets, sizes = set(adapter.manifest.targets), []
        for layer in self._projections.layers:
            for product in dict.fromkeys(each.product for each in layer):
                matrix = [each for each in layer if each.product == product]
                if any(each.name in targets for each in matrix):
                    sizes.append(sum(each.inputs * each.outputs for each in matrix))
        return sizes


class ProfilePrices(ModePrices):
    """Prices of a profile, which steps don't change."""

    def __init__(self, costs: CostModel) -> None:
        self._costs = costs

    def step_seconds(self, batch: Batch, merged: Adapter | None, context: float) -> float:
        """The engine's own time included, without padding."""
        costs, work = self._costs, work_of(batch, merged)
        ranks = costs.kernel.rank_work(work.users, work.row_ranks, work.max_rank)
        rows, longest = work.rows, round(context)
        step = StepWork(
            rows,
            rows,
            kv_tokens=round(rows * context),
            longest=longest,
            row_ranks=ranks,
            token_ranks=ranks,
            adapter_ranks=work.adapter_ranks,
        )
        return costs.step.seconds(step) + costs.overhead.seconds(rows)

    def merge_seconds(self, adapter: Adapter) -> float:
        """0 where the profile has no merge cost."""
        return 0.0 if self._costs.merge is None else self._costs.merge.seconds(adapter.rank)

    def observe(self, batch: Batch, merged: Adapter | None, context: float, seconds: float) -> None:
        """Nothing is learned."""

    def observe_merge(self, adapter: Adapter, seconds: float) -> None:
        """Nothing is learned."""


class MergedOnly(ModePolicy):
    """Serves one adapter until it has no requests left, then the first eligible one of `ModeState.fcfs`.

    oldest: serve the oldest request's adapter in every step, as the authors' code does (LLMServe/dLoRA-artifact,
    vllm/core/scheduler.py, `_always_merge_schedule`). It takes others' slots, so steps need a separate limit of
    sequences (`SimScheduler.limit_rows`).
    """

    def __init__(self, *, oldest: bool = False) -> None:
        self._oldest = oldest

    def choose(self, state: ModeState) -> ModeChoice:
        merged = state.merged
        if self._oldest or merged is None or not state.requests.get(merged):
            merged = next(
                (adapter for adapter in state.fcfs if adapter is not None and adapter in state.eligible), None
            )
        return ModeChoice() if merged is None else ModeChoice.alone(merged)
