"""The simulator's scheduler: the serving one, which also plans many equal decode steps at once.

Decode steps without decisions in between run many at once, which makes simulated hours fast.

Tests: tests/perf/simulate/test_engine.py, tests/perf/simulate/test_hooks.py
"""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ...core.requests.request import Request, RequestState
from ...core.requests.types import BASE_LORA_INDEX, RequestOutput, ScheduledSequence, StepPlan, StepResult
from ...core.scheduling.admission import Admission
from ...core.scheduling.lifecycle import Lifecycle
from ...core.scheduling.queue_order import QueueOrder
from ...core.scheduling.queues import Running
from ...core.scheduling.request_memory import RequestMemory
from ...core.scheduling.scheduler import Scheduler
from ...core.scheduling.step_builder import SlotSource, StepBuilder
from ...memory.adapters.adapter import Adapter, Tier
from ...memory.pages.block import Block


@dataclass(slots=True)
class RepeatedPlan(StepPlan):
    """A decode step of all running requests that may run several times, each sequence continuing with its sampled
    token.
    """

    repeat: int = 1
    """Steps before the scheduler itself would decide anything else."""
    until: float = math.inf
    """None of them may begin at or after this time, by the engine's clock."""


@dataclass(slots=True)
class RepeatedResult(StepResult):
    """count: steps that ran, at most the plan's `repeat`; each sequence sampled the same token in all of them.
    first_end: end of the first of them, by the engine's clock.
    """

    count: int = 1
    first_end: float = 0.0


def most_steps(
    memory: RequestMemory, block_tokens: int, requests: Sequence[Request], steps: int, wanted: Iterable[Adapter]
) -> int:
    """Return the number of decode steps of all of `requests` for which there are pages, at most `steps`; the first has
    its pages.

    wanted: adapters that keep their pages as long as possible; they are evicted after all others.
    """
    available = memory.num_available_pages
    available -= sum(len(adapter.pages) for adapter in wanted if adapter.is_idle)
    if len(requests) * -(-steps // block_tokens) <= available:
        return steps

    def missing(steps: int) -> int:
        """Pages to allocate for all requests, about to compute a token each, to compute so many tokens."""
        return sum(request.block_table.missing_pages(request.num_computed_tokens + steps) for request in requests)

    return max(1, bisect_right(range(1, steps + 1), available, key=missing))


def catch_up(memory: RequestMemory, block_tokens: int, requests: Sequence[Request], steps: int) -> None:
    """Apply the effect on pages of `steps` decode steps of all of `requests`, followed by planning one more.

    Their tokens are known already; the caller sets `num_computed_tokens`.
    """
    if steps > len(requests) * block_tokens:
        for request in requests:
            memory.grow(request, len(request.token_ids))
        return
    while requests := [request for request in requests if request.room < len(request.token_ids)]:
        memory.grow_each(requests)


TOKEN = 1
"""The token of every sequence. The model has no end-of-sequence token: a request's length is its `max_tokens`."""

MOST_REPEATS = 1 << 20


class SimRequest(Request):
    """A request. is_cold: its adapter was incomplete when it could have begun."""

    __slots__ = ("is_cold",)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_cold = False


class SimLifecycle(Lifecycle):
    """A lifecycle of `SimRequest`s.

    unnoted: requests with an adapter whose need to wait is not known yet.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.unnoted: dict[Request, None] = {}

    def add(self, request: Request) -> None:
        super().add(request)
        if request.adapter is not None:
            self.unnoted[request] = None

    def send_back(self, request: Request, state: RequestState) -> None:
        super().send_back(request, state)
        if request.adapter is not None:
            self.unnoted[request] = None


class SimAdmission(Admission):
    """Admission that also counts cold starts.

    most_prompts, most_rows: in one step; None for as many as there is room for. awaits_growth: the last `admit` ended
    because of the requests' expected growth, which may differ in any step.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        assert isinstance(self.lifecycle, SimLifecycle)
        self._unnoted = self.lifecycle.unnoted
        self.most_prompts: int | None = None
        self.most_rows: int | None = None
        self._most_rows = math.inf  # of the step being decided
        self.awaits_growth = False
        self.num_cold_starts = 0
        self._current_order: QueueOrder | None = None
        self._has_passed_over = False

    def admit(self, builder: StepBuilder) -> None:
        self.awaits_growth = self._has_passed_over = False
        self._current_order = None
        self._most_rows = math.inf if self.most_rows is None else self.most_rows
        if self.most_prompts is not None:
            prompts = sum(len(request.token_ids) - request.num_computed_tokens > 1 for request in builder.running)
            self._most_rows = min(self._most_rows, builder.num_sequences + self.most_prompts - prompts)
        super().admit(builder)
        for request in builder.admitted:
            self._unnoted.pop(request, None)
            if request.adapter is not None and request.adapter.transfer is not None:
                self._count_cold(request)
        order = self._current_order
        if self._unnoted and order is not None and (self._has_passed_over or order.next() is None):
            self._note_cold()

    def find_slot(self, builder: StepBuilder) -> SlotSource | None:
        return super().find_slot(builder) if builder.num_sequences < self._most_rows else None

    def open_queue(self, builder: StepBuilder, slot_source: SlotSource) -> None:
        super().open_queue(builder, slot_source)
        self._current_order = builder.order

    def is_eligible(self, request: Request, builder: StepBuilder) -> bool:
        is_eligible = super().is_eligible(request, builder)
        self._has_passed_over |= not is_eligible
        return is_eligible

    def fits(self, request: Request, blocks: list[Block], builder: StepBuilder) -> bool:
        fits = super().fits(request, blocks, builder)
        self.awaits_growth = not fits and self.memory.fits(request, blocks)
        return fits

    def stays_shut_until(self, running: Running) -> float | None:
        """Return the time at which the queue's order changes, if no request in it can be admitted before a running one
        ends.

        Running requests only take pages, so requests that did not fit still won't. But the order changes when a request
        has been overtaken for long enough, or a tenant has waited too long for a turn. An adapter that has been read
        may be loaded, and known blocks may be shared. None if a request may be admitted sooner.
        """
        limits, until = self.limits, math.inf
        if len(running) >= limits.max_num_seqs:
            return until if len(self.waiting.tenants.keys() | running.tenants.keys()) == 1 else None
        if self.most_rows is not None and len(running) >= self.most_rows:
            return until
        if self.awaits_growth or self.memory.use_prefix_cache or len(self.waiting.tenants) > 1:
            return None
        overdue_before = self.clock() - limits.max_overtake_seconds
        for request in self.waiting:
            if request.adapter is not None and self.store.tier(request.adapter) is Tier.LOADING:
                return None
            if request.arrival_time >= overdue_before:
                until = min(until, request.arrival_time + limits.max_overtake_seconds)
        return until

    def _note_cold(self) -> None:
        """Slots are free and requests wait: count each that needs an adapter still to be read."""
        for request in list(self._unnoted):
            adapter = request.adapter
            if request not in self.waiting:
                del self._unnoted[request]
            elif adapter is not None and not adapter.pages and self.store.tier(adapter) is not Tier.HOST:
                del self._unnoted[request]
                self._count_cold(request)

    def _count_cold(self, request: Request) -> None:
        assert isinstance(request, SimRequest)
        self.num_cold_starts += not request.is_cold
        request.is_cold = True


class SimScheduler(Scheduler):
    """Takes `SimRequest`s only. Every sequence samples `TOKEN`, which ends no request, so each generates its maximum.

    mix: prompts and decoding requests share steps, as when serving. Otherwise a prompt interrupts decoding: its step
    has no other sequences, and decoding continues once no prompt is left (CaraServe, Fig. 2).
    """

    admission_type = SimAdmission
    lifecycle_type = SimLifecycle
    _admission: SimAdmission

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mix = True
        self.may_repeat = True  # False if something is decided before every step
        self._num_decoding = 0  # requests that the fast path has just found; 0 if it was not taken
        self._all_drew = False  # every running request sampled a token in the last step

    @property
    def num_cold_starts(self) -> int:
        """Requests whose adapter was incomplete when they could begin."""
        return self._admission.num_cold_starts

    def limit_prompts(self, most: int | None) -> None:
        """Let no step begin more than `most` prompts, as in Punica (§5), where the limit is 1."""
        self._admission.most_prompts = most

    def limit_rows(self, most: int | None) -> None:
        """Let no step have more than `most` sequences, which the oldest requests take; the others keep their KV and are
        descheduled.

        dLoRA's artifact does the same, where slots are only limited by memory. Without it, a request that a mode leaves
        out would keep others from its slot.
        """
        self._admission.most_rows = most

    def count_by_adapter(self, most: int) -> tuple[dict[Adapter | None, int], dict[Adapter | None, int]]:
        """With a limit of sequences the first ones are the oldest, because no request keeps its place in the batch."""
        requests, first = super().count_by_adapter(most)
        if self._admission.most_rows is not None:
            first = dict(Counter([request.adapter for request in self._oldest(self.running, self.waiting, most)]))
        return requests, first

    def _oldest(self, running: Iterable[Request], waiting: Iterable[Request], most: int) -> list[Request]:
        """Return the `most` requests that came first. waiting: in order of arrival."""
        there = itertools.chain(running, itertools.islice(waiting, most))
        return heapq.nsmallest(most, there, key=lambda request: request.arrival_time)

    def schedule(self) -> StepPlan | None:
        """Decide the next step; a `RepeatedPlan` if the steps after it would be decided the same way."""
        plan = super().schedule()
        # Nothing is repeated if another request takes a decoding one's place in the batch; then the plan is not to be
        # reused.
        if plan is None or self.running.plan is None or len(plan.sequences) != self._num_decoding:
            return plan if plan is None or self.mix else _prompts_first(plan)
        return self._repeated(plan)

    def schedule_running(self, builder: StepBuilder, candidates: Sequence[Request]) -> None:
        most, only = self._admission.most_rows, self.eligible_adapters
        if most is not None and (self.waiting or len(candidates) > most):
            waiting = self.waiting if only is None else (each for each in self.waiting if each.adapter in only)
            if len(self.running) >= self._limits.max_num_seqs:  # no waiting request may begin, however old
                waiting = ()
            oldest = set(self._oldest(candidates, waiting, most))
            candidates = [request for request in candidates if request in oldest]
        super().schedule_running(builder, candidates)

    def grow_decodes(self, ahead: int = 0) -> bool:
        most = self._admission.most_rows
        if most is not None and len(self.running) > most:
            self._num_decoding, self._all_drew = 0, False
            return False
        all_decode = super().grow_decodes(ahead)
        self._num_decoding = len(self.running) if all_decode and self._all_drew else 0
        self._all_drew = False  # until the step's result is known, should it ever be
        return all_decode

    def _repeated(self, plan: StepPlan) -> StepPlan:
        """Return a decode step of all running requests with the number of such steps until the next decision.

        Arrivals and aborts are left out. Nothing is decided until a request ends or pages run short. Pages of waiting
        requests' adapters are not touched: that would change which adapters are read ahead and which request is first.
        """
        if self._store.loads.under_way or self._memory.swapped.copies or not self.may_repeat:
            return plan
        most_adapters = self._allocator.max_adapters
        if most_adapters is not None and len(self.waiting.adapters().union(plan.adapters)) > most_adapters:
            return plan  # adapters take turns by the clock
        most = min(MOST_REPEATS, min([request.max_length - len(request.token_ids) for request in self.running]))
        until = math.inf
        if most > 1 and self.waiting:
            shut_until = self._admission.stays_shut_until(self.running)
            if shut_until is None or self._may_load_ahead():
                return plan
            until = shut_until
        if most > 1:
            wanted = self.waiting.adapters()
            most = most_steps(self._memory, self._memory.block_tokens, self.running, most, wanted)
        if most == 1:
            return plan
        return RepeatedPlan(plan.step_id, plan.sequences, plan.adapters, plan.bucket, repeat=most, until=until)

    def _may_load_ahead(self) -> bool:
        """True if a waiting request's adapter may soon be ready to be loaded ahead."""
        window = itertools.islice(self.waiting, self._limits.prefetch)
        adapters = {request.adapter for request in window if request.adapter is not None}
        there = (Tier.HOST, Tier.FAILED)
        return any(not adapter.pages and self._store.tier(adapter) not in there for adapter in adapters)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply the result of a step, or of several equal ones, of which the last one's outputs are returned."""
        if isinstance(result, RepeatedResult):
            self._allocator.note_step(plan.adapters, result.first_end)
            self._catch_up(plan.sequences, result)
        outputs = super().update(plan, result)
        self._all_drew = [output.finish_reason for output in outputs].count(None) == len(self.running)
        return outputs

    def _catch_up(self, rows: Sequence[ScheduledSequence], result: RepeatedResult) -> None:
        """Advance the requests of a repeated plan to the last of its steps."""
        steps = result.count - 1
        tokens, known, requests = [TOKEN] * steps, self._requests, []
        for row in rows:
            request = known[row.request_id]
            request.token_ids += tokens
            row.start += steps
            requests.append(request)
        catch_up(self._memory, self._memory.block_tokens, requests, steps)
        for request, row in zip(requests, rows, strict=True):
            request.num_computed_tokens = row.start
        self._count_steps(len(rows), steps)
        self.num_generated_tokens += steps * len(rows)


def _prompts_first(plan: StepPlan) -> StepPlan:
    """Return the prompts of a step that also decodes; other plans unchanged.

    The decoding sequences are decided again after it, like those of any plan that was not run.
    """
    rows = [row for row in plan.sequences if len(row.tokens) > 1]
    if not rows or len(rows) == len(plan.sequences):
        return plan
    lora_indices = {
        lora_index: index
        for index, lora_index in enumerate(sorted({row.lora_index for row in rows} - {BASE_LORA_INDEX}))
    }
    for row in rows:
        row.lora_index = lora_indices.get(row.lora_index, BASE_LORA_INDEX)
    return StepPlan(plan.step_id, rows, [plan.adapters[lora_index] for lora_index in lora_indices])
