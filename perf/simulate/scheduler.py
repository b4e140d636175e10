"""The simulator's scheduler: the serving one, which also plans many equal decode steps at once."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from ...core.requests.request import Request, RequestState
from ...core.requests.sampling_params import SamplingParams
from ...core.requests.types import BASE_SLOT, RequestOutput, ScheduledRow, StepInfo, StepPlan, StepResult
from ...core.scheduling.admission import Admission
from ...core.scheduling.draft import Draft, Place, QueueOrder
from ...core.scheduling.lifecycle import Lifecycle
from ...core.scheduling.queues import Running
from ...core.scheduling.scheduler import Scheduler
from ...memory.adapters.adapter import Adapter, Tier
from ...memory.pages.prefix import Block
from .executor import TOKEN
from .repeats import RepeatedPlan, RepeatedResult, catch_up, most_steps

MOST_REPEATS = 1 << 20


class SimRequest(Request):
    """A request with two outputs at most: with its first token and, when it ends, with its last one.

    has_told: it has had its first output. is_cold: its adapter was not all there when it could have begun.
    quiet_until: number of computed tokens below which it has no output, caches nothing and does not end.
    """

    __slots__ = ("has_told", "is_cold", "quiet_until")

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: SamplingParams,
        adapter_name: str | None = None,
        arrival_time: float = 0.0,
    ) -> None:
        super().__init__(request_id, prompt_token_ids, params, adapter_name, arrival_time)
        self.has_told = False
        self.is_cold = False
        self.quiet_until = 0


class SimLifecycle(Lifecycle):
    """A lifecycle of `SimRequest`s.

    unnoted: requests with an adapter of which it is not known yet whether they have to wait for it.
    """

    requests: dict[str, SimRequest]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.unnoted: dict[SimRequest, None] = {}

    def add(self, request: SimRequest) -> None:
        super().add(request)
        if request.adapter is not None:
            self.unnoted[request] = None

    def send_back(self, request: SimRequest, state: RequestState) -> None:
        super().send_back(request, state)
        request.quiet_until = 0
        if request.adapter is not None:
            self.unnoted[request] = None


class SimAdmission(Admission):
    """Admission that also counts cold starts.

    most_prompts, most_rows: in one step; None for as many as there is room for.
    awaits_growth: the last `admit` ended for what requests are expected to grow by, which may differ in any step.
    """

    _lifecycle: SimLifecycle

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.most_prompts: int | None = None
        self.most_rows: int | None = None
        self._most_rows = math.inf  # of the step being decided
        self.awaits_growth = False
        self.num_cold_starts = 0
        self._current_order: QueueOrder | None = None
        self._has_passed_over = False

    def admit(self, draft: Draft) -> None:
        self.awaits_growth = self._has_passed_over = False
        self._current_order = None
        self._most_rows = math.inf if self.most_rows is None else self.most_rows
        if self.most_prompts is not None:
            prompts = sum(len(request.token_ids) - request.num_computed_tokens > 1 for request in draft.running)
            self._most_rows = min(self._most_rows, draft.num_rows + self.most_prompts - prompts)
        super().admit(draft)
        for request in draft.begun:
            self._lifecycle.unnoted.pop(request, None)
            if request.adapter is not None and request.adapter.transfer is not None:
                self._count_cold(request)
        order = self._current_order
        if self._lifecycle.unnoted and order is not None and (self._has_passed_over or order.next() is None):
            self._note_cold()

    def _place(self, draft: Draft) -> Place | None:
        return super()._place(draft) if draft.num_rows < self._most_rows else None

    def _open(self, draft: Draft, place: Place) -> None:
        super()._open(draft, place)
        self._current_order = draft.order

    def _may_join(self, request: Request, draft: Draft) -> bool:
        may_join = super()._may_join(request, draft)
        self._has_passed_over |= not may_join
        return may_join

    def _has_room(self, request: Request, blocks: list[Block], draft: Draft) -> bool:
        has_room = super()._has_room(request, blocks, draft)
        self.awaits_growth = not has_room and self._memory.fits(request, blocks)
        return has_room

    def stays_shut_until(self, running: Running) -> float | None:
        """Return when the queue's order changes, if no request in it can be admitted before a running one ends.

        Running requests only take pages, so what did not fit won't. But the order changes when a request has been
        overtaken for long enough, or a tenant has waited too long for a turn, an adapter that has been read may be
        loaded, and known blocks may be shared: None where a request may be admitted sooner.
        """
        limits, until = self._limits, math.inf
        if len(running) >= limits.max_num_seqs:
            return until if len(self._waiting.accounts.keys() | running.accounts.keys()) == 1 else None
        if self.most_rows is not None and len(running) >= self.most_rows:
            return until
        if self.awaits_growth or self._memory.use_prefix_cache or len(self._waiting.accounts) > 1:
            return None
        overdue_before = self._clock() - limits.max_overtake_seconds
        for request in self._waiting:
            if request.adapter is not None and self._store.tier(request.adapter) is Tier.LOADING:
                return None
            if request.arrival_time >= overdue_before:
                until = min(until, request.arrival_time + limits.max_overtake_seconds)
        return until

    def _note_cold(self) -> None:
        """Seats are free and requests wait: count each that needs an adapter still to be read."""
        unnoted = self._lifecycle.unnoted
        for request in list(unnoted):
            if request not in self._waiting:
                del unnoted[request]
            elif not request.adapter.pages and self._store.tier(request.adapter) is not Tier.HOST:
                del unnoted[request]
                self._count_cold(request)

    def _count_cold(self, request: SimRequest) -> None:
        self.num_cold_starts += not request.is_cold
        request.is_cold = True


class SimScheduler(Scheduler):
    """Takes `SimRequest`s only. Every row draws `TOKEN`, which ends no request, so that each draws all that it may.

    mix: prompts and decoding requests share steps, as when serving. Otherwise a prompt interrupts decoding: its step
    holds no other rows, and decoding goes on once no prompt is left (CaraServe, Fig. 2).
    """

    admission_type = SimAdmission
    lifecycle_type = SimLifecycle
    _admission: SimAdmission
    _requests: dict[str, SimRequest]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mix = True
        self.may_repeat = True  # False where something is decided before every step
        self._num_decoding = 0  # requests that the fast path has just found; 0 where it was not taken
        self._all_drew = False  # every running request drew a token in the last step

    @property
    def num_cold_starts(self) -> int:
        """Requests with an adapter that was not all there when they could begin."""
        return self._admission.num_cold_starts

    def limit_prompts(self, most: int | None) -> None:
        """Let no step begin more than `most` prompts, as in Punica (§5), where the limit is 1."""
        self._admission.most_prompts = most

    def limit_rows(self, most: int | None) -> None:
        """Let no step have more than `most` rows, which the oldest requests take; the others keep their KV and no row.

        So it is in dLoRA's artifact, where seats are only limited by memory. Here a request that a mode leaves out
        would else keep others from its seat.
        """
        self._admission.most_rows = most

    def count_by_adapter(self, most: int) -> tuple[dict[Adapter | None, int], dict[Adapter | None, int]]:
        """With a limit of rows the first ones are the oldest, as no request keeps a row for having had it."""
        requests, first = super().count_by_adapter(most)
        if self._admission.most_rows is not None:
            first = dict(Counter([request.adapter for request in self._oldest(self.running, self.waiting, most)]))
        return requests, first

    def _oldest(self, running: Iterable[Request], waiting: Iterable[Request], most: int) -> list[Request]:
        """Return the `most` requests that came first. waiting: in order of arrival."""
        there = itertools.chain(running, itertools.islice(waiting, most))
        return heapq.nsmallest(most, there, key=lambda request: request.arrival_time)

    def schedule(self) -> StepPlan | None:
        """Decide the next step; a `RepeatedPlan` where the steps after it would be decided alike."""
        plan = super().schedule()
        # Nothing is repeated where another request takes a decoding one's row; then the plan is not to be reused.
        if plan is None or self.running.plan is None or len(plan.rows) != self._num_decoding:
            return plan if plan is None or self.mix else _prompts_first(plan)
        return self._repeated(plan)

    def _all_decode(self) -> bool:
        return self._all_drew or super()._all_decode()

    def _take_running(self, draft: Draft, candidates: Sequence[Request]) -> None:
        most, only = self._admission.most_rows, self.only
        if most is not None and (self.waiting or len(candidates) > most):
            waiting = self.waiting if only is None else (each for each in self.waiting if each.adapter in only)
            if len(self.running) >= self._limits.max_num_seqs:  # no waiting request may begin, however old
                waiting = ()
            oldest = set(self._oldest(candidates, waiting, most))
            candidates = [request for request in candidates if request in oldest]
        super()._take_running(draft, candidates)

    def _grow_decodes(self, ahead: int = 0) -> bool:
        most = self._admission.most_rows
        if most is not None and len(self.running) > most:
            self._num_decoding, self._all_drew = 0, False
            return False
        all_decode = super()._grow_decodes(ahead)
        self._num_decoding = len(self.running) if all_decode and self._all_drew else 0
        self._all_drew = False  # until the step's result is known, should it ever be
        return all_decode

    def _repeated(self, plan: StepPlan) -> StepPlan:
        """Return a decode step of all running requests with the number of such steps until the next decision.

        Arrivals and aborts are left out. Nothing is decided until a request ends or pages run short. What waiting
        requests' adapters hold is not touched, since that would change what is read ahead and which request is first.
        """
        if self._store.loads.under_way or self._memory.swapped.copies or not self.may_repeat:
            return plan
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
        return RepeatedPlan(plan.step_id, plan.rows, plan.adapters, plan.bucket, repeat=most, until=until)

    def _may_load_ahead(self) -> bool:
        """True if a waiting request's adapter may soon be there to be loaded ahead."""
        window = itertools.islice(self.waiting, self._limits.prefetch)
        adapters = {request.adapter for request in window if request.adapter is not None}
        there = (Tier.HOST, Tier.FAILED)
        return any(not adapter.pages and self._store.tier(adapter) not in there for adapter in adapters)

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Apply the result of a step, or of several equal ones; requests without an output cost little."""
        info = self.last_step = StepInfo(plan.step_id, len(plan.rows), len(plan.adapters), plan.num_tokens)
        if isinstance(result, RepeatedResult):
            self._catch_up(plan.rows, result)
        self._count_steps(plan.num_tokens)
        requests, unready = self._requests, result.unready
        outputs: list[RequestOutput] = []
        num_quiet, num_going = len(plan.rows), 0
        for row in plan.rows:
            request, computed = requests.get(row.request_id), row.start + 1
            if request is not None and computed < request.quiet_until and not unready:
                row.start = request.num_computed_tokens = computed
                request.token_ids.append(TOKEN)
                continue
            num_quiet -= 1
            if request is None or row.request_id in unready:
                continue
            output = self._advance(request, row, result, info)
            if output is not None:
                num_going += output.finish_reason is None
                self._tell(request, output, outputs)
        self.num_generated_tokens += num_quiet
        self._all_drew = num_quiet + num_going == len(self.running)
        if unready:
            self._send_back_late(result)
        return outputs

    def _catch_up(self, rows: Sequence[ScheduledRow], result: RepeatedResult) -> None:
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

    def _tell(self, request: SimRequest, output: RequestOutput, outputs: list[RequestOutput]) -> None:
        """Add a request's output if it is its first or its last."""
        if output.finish_reason is None and not request.caching:
            request.quiet_until = request.max_length - 1
        if output.finish_reason is not None or not request.has_told:
            request.has_told = True
            outputs.append(output)


def _prompts_first(plan: StepPlan) -> StepPlan:
    """Return the prompts of a step that also decodes; other plans as they are.

    The decode rows are decided again after it, as the rows of any plan that was not run.
    """
    rows = [row for row in plan.rows if len(row.tokens) > 1]
    if not rows or len(rows) == len(plan.rows):
        return plan
    slots = {slot: index for index, slot in enumerate(sorted({row.slot for row in rows} - {BASE_SLOT}))}
    for row in rows:
        row.slot = slots.get(row.slot, BASE_SLOT)
    return StepPlan(plan.step_id, rows, [plan.adapters[slot] for slot in slots])
