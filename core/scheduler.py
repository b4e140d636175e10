"""Token-budget continuous batching with chunked prefill.

A step takes from every running request the tokens whose KV is missing (one for a decoding request), then admits
waiting requests in queue order while tokens, seats and pages last. No tensors here.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator

from ..graphs.buckets import DecodeBuckets
from ..memory.adapter import Adapter, Tier
from ..memory.adapter_format import AdapterFormatError
from ..memory.adapter_store import AdapterStore
from ..memory.pages import PageKind
from ..memory.prefix import Block
from .load_ahead import LoadAhead
from .load_policy import LoadPolicy
from .queue_order import queue_order
from .repeats import Repeats
from .request import Request
from .request_memory import RequestMemory
from .scheduler_limits import SchedulerLimits
from .step_planner import plan_step
from .types import FinishReason, RequestOutput, StepInfo, StepPlan, StepResult

logger = logging.getLogger(__name__)


class Scheduler:
    """Owns the queues; what requests hold is given and taken by `RequestMemory`."""

    def __init__(
        self,
        limits: SchedulerLimits,
        store: AdapterStore,
        memory: RequestMemory,
        loads: LoadPolicy,
        buckets: DecodeBuckets,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._store = store
        self._memory = memory
        self._loads = loads
        self._buckets = buckets
        self._clock = clock
        self._ahead = LoadAhead(limits, store, memory)
        self._repeats = Repeats(limits, store, memory, self._ahead, clock)
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._failed: list[RequestOutput] = []
        self._late: set[Adapter] = set()  # made a step wait in vain: their requests sit out until all of it is there
        self._num_steps = 0
        self.num_preemptions = 0
        self.num_cold_starts = 0  # requests whose adapter was not all there when they could begin

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def running_adapters(self) -> set[str]:
        """Names of adapters that running requests use."""
        return {request.adapter_name for request in self._running if request.adapter_name is not None}

    @property
    def waiting_adapters(self) -> set[str]:
        """Names of adapters that waiting requests will use."""
        return {request.adapter_name for request in self._waiting if request.adapter_name is not None}

    def has_work(self) -> bool:
        return bool(self._requests or self._failed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._waiting.append(request)
        if request.adapter is not None:
            self._store.hold(request.adapter)
            if len(self._waiting) <= self._limits.lookahead:
                self._ahead.read(self._waiting)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its pages; False when it is not here (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        return True

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None when nothing can run. Block tables of its rows already cover its tokens."""
        self._settle_loads()
        chosen, budget, preempted = self._schedule_running()
        admitted = [] if preempted else self._admit(budget)
        self._ahead.read(self._waiting)
        if self._limits.prefetch and self._waiting:
            self._ahead.load(self._waiting)
        if not chosen and not admitted:
            return None
        self._num_steps += 1
        plan = plan_step(self._num_steps, chosen + admitted, self._buckets)
        if self._limits.max_repeat > 1 and plan.bucket is not None and not (preempted or admitted):
            plan.repeat = self._repeats.count(plan, self._running, self._waiting)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take a step's result: advance, append drawn tokens, finish what is done."""
        info = StepInfo(plan.step_id, len(plan.rows), plan.num_adapters, plan.num_tokens)
        outputs = []
        if result.count > 1:
            self._catch_up(plan, result)
        for row in plan.rows:
            request = self._requests.get(row.request_id)
            if request is None:
                continue
            if result.unready and request.id in result.unready:
                self._late.add(request.adapter)
                continue
            if result.errors and (error := result.errors.get(request.id)):
                self._finish(request, FinishReason.ERROR)
                outputs.append(RequestOutput(request.id, (), FinishReason.ERROR, error=error, step=info))
                continue
            request.num_computed_tokens = row.start + len(row.tokens)
            if request.caching:
                self._memory.remember(request)
            if result.prompt_logprobs:
                request.prompt_logprobs += result.prompt_logprobs.get(request.id, ())
            if row.samples:
                outputs.append(self._append(request, result, info))
        return outputs

    def take_failed(self) -> list[RequestOutput]:
        """Outputs of requests that failed before they could run."""
        failed, self._failed = self._failed, []
        return failed

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """The KV pages that requests hold, for `PagePool.check_integrity`."""
        for request in self._requests.values():
            if request.block_table is not None:
                yield PageKind.KV, request.block_table.pages

    # -- choosing

    def _settle_loads(self) -> None:
        """End the requests whose adapter will never come; nothing of it stays."""
        for adapter, error in self._store.poll():
            for request in [request for request in self._running if request.adapter is adapter]:
                self._finish(request, FinishReason.ERROR)
                self._failed.append(
                    RequestOutput(request.id, (), FinishReason.ERROR, error=_load_error(request, error))
                )
            self._store.evict(adapter)
        if self._late:
            self._late = {adapter for adapter in self._late if adapter.transfer is not None}

    def _schedule_running(self) -> tuple[list[tuple[Request, int]], int, bool]:
        """Running requests with their token counts, the budget left, and whether any had to be preempted.

        Decoding requests come first, so that a long prompt's chunks never take their turn; then order of admission.
        """
        budget = self._limits.max_num_batched_tokens
        chosen: dict[Request, int] = {}
        preempted = False
        late, block_tokens = self._late, self._limits.block_tokens
        for request in sorted(self._running, key=lambda r: len(r.token_ids) - r.num_computed_tokens > 1):
            if budget <= 0:
                break
            table, start = request.block_table, request.num_computed_tokens
            if table is None or (late and request.adapter in late):  # preempted for one before it, or waits
                continue
            count = len(request.token_ids) - start
            if count > budget:
                count = budget
            while len(table.pages) * block_tokens < start + count and not self._memory.grow(request, start + count):
                preempted = True
                victim = self._running[-1]
                self._preempt(victim)
                budget += chosen.pop(victim, 0)
                if victim is request:
                    break
            else:
                chosen[request] = count
                budget -= count
        return list(chosen.items()), budget, preempted

    def _admit(self, budget: int) -> list[tuple[Request, int]]:
        """Start waiting requests in queue order; those whose adapter is still being read are passed over.

        The first that lacks pages or token budget ends it, so that a large request is not starved by small ones.
        """
        limits = self._limits
        admitted: list[tuple[Request, int]] = []
        if not self._waiting or budget <= 0 or len(self._running) >= limits.max_num_seqs:
            return admitted
        active = {request.adapter for request in self._running if request.adapter is not None}
        overdue_before = self._clock() - limits.max_overtake_seconds
        seats_left = False
        for request in queue_order(self._waiting, self._store, overdue_before):
            if budget <= 0 or len(self._running) >= limits.max_num_seqs:
                break
            adapter = request.adapter
            if adapter is not None and not self._may_run(request, adapter, active, budget):
                seats_left = True
                if request.arrival_time < overdue_before:
                    break
                continue
            blocks = self._memory.match(request)
            missing = request.num_tokens - len(blocks) * limits.block_tokens
            if missing > budget and not limits.chunked_prefill:
                break
            if not self._memory.fits(request, blocks):
                if self._running or self._store.has_transfers:
                    break
                self._waiting.remove(request)  # nobody will ever make more room than there is now
                self._fail(request, "the arena has too few pages left beside pinned adapters; unpin some")
                continue
            self._waiting.remove(request)
            count = min(missing, budget)
            if not self._start(request, blocks, count):
                continue
            self._running.append(request)
            admitted.append((request, count))
            budget -= count
            if adapter is not None:
                active.add(adapter)
        else:
            seats_left = True
        if seats_left:
            self._note_cold()
        return admitted

    def _note_cold(self) -> None:
        """Seats are free and requests wait: count those whose adapter is still to be read."""
        for request in self._waiting:
            adapter = request.adapter
            if adapter is None or adapter.pages or self._store.tier(adapter) is Tier.HOST:
                continue
            self._count_cold(request)

    def _count_cold(self, request: Request) -> None:
        if not request.had_to_wait:
            request.had_to_wait = True
            self.num_cold_starts += 1

    def _may_run(self, request: Request, adapter: Adapter, active: set[Adapter], budget: int) -> bool:
        """Whether a request may run now: its bytes come in time and one more adapter is allowed."""
        most = self._limits.max_adapters_per_step
        if most is not None and adapter not in active and len(active) >= most:
            return False
        return self._loads.may_start(adapter, min(request.num_tokens, budget), alone=not self._running)

    def _start(self, request: Request, blocks: list[Block], count: int) -> bool:
        """Let a waiting request run; a broken adapter fails only this request."""
        if request.start_time is None:
            request.start_time = self._clock()
        try:
            self._memory.start(request, blocks, count)
        except Exception as error:
            self._fail(request, _load_error(request, error))
            return False
        if request.adapter is not None and request.adapter.transfer is not None:
            self._count_cold(request)
        return True

    def _preempt(self, request: Request) -> None:
        """Give back a running request's pages and pin; it recomputes prompt and output when it runs again.

        Draws depend on (seed, position) only, so what it already gave stays true.
        """
        self._memory.release(request)
        request.num_computed_tokens = 0
        request.prompt_logprobs.clear()
        self._running.remove(request)
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    def _catch_up(self, plan: StepPlan, result: StepResult) -> None:
        """Bring the requests of a plan that ran more than once to the last of its steps."""
        steps = result.count - 1
        requests = [self._requests[row.request_id] for row in plan.rows]
        for row, request in zip(plan.rows, requests, strict=True):
            request.token_ids += [result.tokens[request.id]] * steps
            row.start += steps
        self._memory.catch_up(requests, steps)
        self._num_steps += steps

    # -- finishing

    def _append(self, request: Request, result: StepResult, info: StepInfo) -> RequestOutput:
        token = result.tokens[request.id]
        request.token_ids.append(token)
        params, reason, stop_token = request.params, None, None
        num_tokens = len(request.token_ids)
        num_output_tokens = num_tokens - request.num_prompt_tokens
        ends = token in self._limits.eos_token_ids and not params.ignore_eos
        if ends or token in params.stop_token_ids:
            reason, stop_token = FinishReason.STOP, token
        elif num_output_tokens >= params.max_tokens or num_tokens >= self._limits.max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(request, reason)
        logprobs = result.logprobs.get(request.id) if result.logprobs else None
        prompt_logprobs = None
        if params.prompt_logprobs is not None and num_output_tokens == 1:
            prompt_logprobs = tuple(request.prompt_logprobs)
        return RequestOutput(
            request.id,
            (token,) * result.count,
            reason,
            stop_token,
            None,
            info,
            request.num_cached_tokens,
            () if logprobs is None else (logprobs,),
            prompt_logprobs,
        )

    def _fail(self, request: Request, error: str) -> None:
        """End a request that is in no queue."""
        request.finish_reason = FinishReason.ERROR
        self._forget(request)
        self._failed.append(RequestOutput(request.id, (), FinishReason.ERROR, error=error))

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        if request.block_table is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._memory.release(request)
        self._forget(request)

    def _forget(self, request: Request) -> None:
        del self._requests[request.id]
        if request.adapter is not None:
            self._store.let_go(request.adapter)


def _load_error(request: Request, error: BaseException) -> str:
    if isinstance(error, AdapterFormatError):
        return str(error)
    logger.error("loading %r failed", request.adapter, exc_info=error)
    return f"adapter {request.adapter_name!r} was not loaded: {type(error).__name__}: {error}"
