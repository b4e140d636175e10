"""Applies a mode policy: asks it before each step, applies its choice, and bounds how long it may exclude requests.

Tests: tests/core/merging/test_merged.py.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from contextlib import suppress

from ...memory.adapters.adapter import Adapter
from ..config import EngineConfig
from ..requests.types import CannotMerge, ScheduledSequence, StepPlan
from ..scheduling.scheduler import Scheduler
from ..scheduling.service import Growth
from .dlora import AdaptiveThresholds, ArtifactThresholds, Credits, DynamicBatching
from .fastest_mode import FastestMode
from .learned_prices import LearnedPrices
from .merging import Merging
from .mode_policy import Batch, ModeChoice, ModePolicy, ModePrices, ModeState


def mode_policy(name: str, prices: ModePrices | None = None, expert_share: float = 0.0) -> ModePolicy | None:
    """Return the policy of `EngineConfig.mode_policy`; None for "manual". prices: by default learned. expert_share: of
    the model, see `LearnedPrices`.
    """
    prices = prices or LearnedPrices(expert_share)
    match name:
        case "dlora-1":
            return DynamicBatching()
        case "dlora-2":
            return AdaptiveThresholds(DynamicBatching(), prices)
        case "dlora-3":
            return Credits(AdaptiveThresholds(DynamicBatching(), prices))
        case "dlora-artifact":
            return Credits(ArtifactThresholds(DynamicBatching(), prices))
        case "fastest":
            return FastestMode(prices)
    return None


class Patience:
    """Limits how long steps may exclude all requests of a tenant, whatever the policy.

    Steps may do so for `max_turn_seconds` or `max_turn_steps`, or until a tenant is overdue for its turn; then all
    requests run for as long as a tenant was excluded. So in the long run no tenant loses more than half of the steps,
    or waits longer than without a mode policy. Where one tenant has all requests, or each tenant has a request in the
    step, the policy alone decides.
    """

    def __init__(self, seconds: float, steps: int) -> None:
        self._seconds, self._steps = seconds, steps
        self._left_out = self._num_left_out = 0.0  # seconds and steps to make up for
        self._is_due = False

    def pass_by(self, seconds: float, left_out: bool, is_late: bool) -> None:
        """Record a step's time. left_out: a tenant was excluded. is_late: a tenant is overdue for its turn."""
        if left_out:
            self._left_out += seconds
            self._num_left_out += 1
        else:
            self._left_out = max(0.0, self._left_out - seconds)
            self._num_left_out = max(0.0, self._num_left_out - 1)
        if is_late or self._left_out >= self._seconds or self._num_left_out >= self._steps:
            self._is_due = True
        elif not self._left_out or not self._num_left_out:
            self._is_due = False

    @property
    def is_over(self) -> bool:
        """True if the next step must leave no request out."""
        return self._is_due


class Modes:
    """Applies the policy's choice before each step, and passes the step's time to the policy's prices after it."""

    def __init__(
        self,
        policy: ModePolicy,
        merging: Merging,
        scheduler: Scheduler,
        config: EngineConfig,
        clock: Callable[[], float],
    ) -> None:
        self.policy = policy
        self._prices = policy.prices
        self._merging = merging
        self._scheduler = scheduler
        self.max_batch = config.max_num_seqs
        """Rows of a step."""
        self._patience = Patience(policy.max_exclusion_seconds(config), config.max_turn_steps)
        self._clock = clock
        self._began = math.nan  # of the step before, by which time goes by
        self._leaves_out = False  # a tenant, in the step before
        self._context = self._step_seconds = 0.0
        self._num_merges = 0
        self._sequences: list[ScheduledSequence] = []  # of the last decode step, which go on while they are the same
        self._batch: Batch = {}
        self.predicted_seconds = self.measured_seconds = self.wrong_seconds = 0.0
        """Sums over all decode steps with a prediction: predicted seconds, measured seconds, absolute errors."""
        self.num_left_out = 0
        """Number of steps that excluded requests."""

    def decide(self) -> None:
        """Have the next step run in the mode that the policy chooses."""
        scheduler, merging = self._scheduler, self._merging
        requests, fcfs = scheduler.count_by_adapter(self.max_batch)
        now = self._clock()
        if self._began == self._began and scheduler.has_work():
            self._patience.pass_by(now - self._began, self._leaves_out, self._leaves_out and _has_late_turn(scheduler))
        self._began = now
        self._observe_merge(merging.expected_seconds)
        choice = self.policy.choose(
            ModeState(
                requests=requests,
                fcfs=fcfs,
                eligible=[each for each in requests if each is not None and merging.may_merge(each)],
                max_batch=self.max_batch,
                context=self._context,
                merged=merging.merged,
                shadowed=merging.shadowed,
                is_under_way=merging.is_under_way,
                share_made=merging.share_made,
                step_seconds=self._step_seconds,
                may_leave_out=not self._patience.is_over,
                running=scheduler.running.count_by_adapter(),
                beginning=_count_beginning(scheduler),
            )
        )
        self._apply(choice)
        only = choice.only if choice.merged is merging.merged and not self._patience.is_over else None
        if only is not None and all(adapter in only for adapter in requests):
            only = None
        scheduler.eligible_adapters = only
        self.num_left_out += only is not None
        self._leaves_out = only is not None and leaves_tenant_out(scheduler, only)

    def _apply(self, choice: ModeChoice) -> None:
        merging = self._merging
        if choice.merged is None:
            if not merging.is_under_way or choice.only is None:  # starving requests don't undo a merge
                merging.unmerge()
        elif choice.merged is not merging.merged and merging.may_merge(choice.merged):
            with suppress(CannotMerge):  # it is served unmerged
                merging.merge(choice.merged)

    def of_prefill(self, plan: StepPlan) -> Adapter | None:
        """Return the adapter to merge in a step with prompts: the merged one if most of the tokens are its own.

        The policy goes by decode steps. Prompts are many tokens of few requests; from each token of another adapter the
        merged adapter's part must be subtracted, which is more work than to add it to its own tokens.
        """
        merged = self._merging.merged
        if merged is None or merged not in plan.adapters:
            return None
        lora_index = plan.adapters.index(merged)
        own = sum([len(sequence.tokens) for sequence in plan.sequences if sequence.lora_index == lora_index])
        return merged if 2 * own >= plan.num_tokens else None

    def note(self, plan: StepPlan, seconds: float) -> None:
        """Record the time of a decode step."""
        if plan.sequences is not self._sequences:
            self._sequences, self._batch = plan.sequences, batch_of(plan)
        context = context_of(plan)
        if self._prices is not None:
            self._observe(self._prices, plan.merged, context, seconds)
        self._context, self._step_seconds = context, seconds
        merging = self._merging
        if merging.num_merges > self._num_merges and merging.shadowed is not None:
            self._num_merges = merging.num_merges
            self._observe_merge(merging.merge_seconds)

    def _observe(self, prices: ModePrices, merged: Adapter | None, context: float, seconds: float) -> None:
        """Compare a decode step's time with the prediction, and let the prices learn it."""
        if self._step_seconds:
            predicted = prices.step_seconds(self._batch, merged, context)
            self.predicted_seconds += predicted
            self.measured_seconds += seconds
            self.wrong_seconds += abs(predicted - seconds)
        prices.observe(self._batch, merged, context, seconds)

    def _observe_merge(self, seconds: float | None) -> None:
        """Have the prices learn the time of the shadow weights' merge; None: nothing is known of it yet."""
        adapter = self._merging.shadowed
        if self._prices is not None and adapter is not None and seconds is not None:
            self._prices.observe_merge(adapter, seconds)


def leaves_tenant_out(scheduler: Scheduler, only: Collection[Adapter | None]) -> bool:
    """True if a tenant has requests, but no running one of `only`, while another tenant has requests, too."""
    running = scheduler.running
    tenants = running.tenants.keys() | scheduler.waiting.tenants
    return len(tenants) > max(1, len({each.fairness_key for each in running if each.adapter in only}))


def _has_late_turn(scheduler: Scheduler) -> bool:
    """True if a tenant is overdue for its turn."""
    if len(scheduler.waiting.tenants) < 2:
        return False
    turns = scheduler.lifecycle.service.restart_turns()
    return turns.top() is not None and turns.is_overdue


def _count_beginning(scheduler: Scheduler) -> int:
    """Return how many waiting requests memory has room for: the pages left after the running requests' expected growth,
    over the mean number of pages that a running request is expected to end with.
    """
    running, lifecycle = scheduler.running, scheduler.lifecycle
    if not scheduler.waiting or not running:
        return len(scheduler.waiting)
    memory = lifecycle.memory
    growth = Growth(lifecycle.service.lengths, memory.layout, running).total
    pages = sum([memory.layout.pages_for_tokens(request.room) for request in running]) + growth
    return max(0, memory.num_available_pages - growth) * len(running) // max(1, pages)


def batch_of(plan: StepPlan) -> Batch:
    """Return how many rows of a step each adapter has, and the base model."""
    adapters: list[Adapter | None] = [*plan.adapters, None]  # the base model's slot is the last
    lora_indices = Counter([sequence.lora_index for sequence in plan.sequences])
    return {adapters[lora_index]: count for lora_index, count in lora_indices.items()}


def context_of(plan: StepPlan) -> float:
    """Return the mean of the tokens that a step's rows have in the KV cache."""
    return sum([sequence.start for sequence in plan.sequences]) / len(plan.sequences)
