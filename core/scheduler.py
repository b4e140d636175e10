"""Token-budget continuous batching with chunked prefill.

A step takes from every running request the tokens whose KV is missing (one for a decoding request), then admits
waiting requests first come first served while tokens, seats and pages last. No tensors here.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from ..graphs.buckets import DecodeBuckets
from ..memory.adapter_format import AdapterFormatError
from ..memory.adapter_store import Adapter, AdapterStore
from ..memory.kv import BlockTable
from ..memory.pages import PageKind, PagePool
from .request import Request
from .types import BASE_SLOT, FinishReason, RequestOutput, ScheduledRow, StepInfo, StepPlan, StepResult

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets of a step and bounds of a request."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    max_model_len: int
    block_tokens: int
    eos_token_ids: frozenset[int]


class Scheduler:
    """Owns the queues and the block tables of running requests."""

    def __init__(self, limits: SchedulerLimits, pool: PagePool, store: AdapterStore, buckets: DecodeBuckets) -> None:
        self._limits = limits
        self._pool = pool
        self._store = store
        self._buckets = buckets
        self._requests: dict[str, Request] = {}
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._failed: list[RequestOutput] = []
        self._step_ids = itertools.count(1)
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def has_work(self) -> bool:
        return bool(self._requests or self._failed)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._waiting.append(request)

    def abort(self, request_id: str) -> bool:
        """Forget a request and free its pages; False when it is not here (any more)."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._finish(request, FinishReason.ABORT)
        return True

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None when nothing can run. Block tables of its rows already cover its tokens."""
        chosen, preempted = self._schedule_running()
        budget = self._limits.max_num_batched_tokens - sum(count for _, count in chosen)
        if not preempted:
            chosen += self._admit(budget)
        return self._plan(chosen) if chosen else None

    def update(self, plan: StepPlan, result: StepResult) -> list[RequestOutput]:
        """Take a step's result: advance, append drawn tokens, finish what is done."""
        info = StepInfo(plan.step_id, len(plan.rows), plan.num_adapters, plan.num_tokens)
        outputs = []
        for row in plan.rows:
            request = self._requests.get(row.request_id)
            if request is None:
                continue
            request.num_computed_tokens = row.kv_len
            if error := result.errors.get(request.id):
                self._finish(request, FinishReason.ERROR)
                outputs.append(RequestOutput(request.id, (), FinishReason.ERROR, error=error, step=info))
            elif row.sampling is not None:
                outputs.append(self._append(request, result.tokens[request.id], info))
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

    def _schedule_running(self) -> tuple[list[tuple[Request, int]], bool]:
        """Running requests in order of admission with their token counts, and whether any had to be preempted."""
        budget = self._limits.max_num_batched_tokens
        chosen: list[tuple[Request, int]] = []
        preempted = False
        index = 0
        while index < len(self._running) and budget > 0:
            request = self._running[index]
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            while not self._grow(request, request.num_computed_tokens + count):
                preempted = True
                self._preempt(self._running[-1])
                if index == len(self._running):  # the request itself was the last one
                    return chosen, preempted
            chosen.append((request, count))
            budget -= count
            index += 1
        return chosen, preempted

    def _admit(self, budget: int) -> list[tuple[Request, int]]:
        """Start waiting requests, first come first served, until the first that does not fit."""
        admitted = []
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting[0]
            count = min(request.num_tokens, budget)
            if count < request.num_tokens and not self._limits.chunked_prefill:
                break
            if not self._fits(request):
                break
            self._waiting.popleft()
            if not self._start(request, count):
                continue
            self._running.append(request)
            admitted.append((request, count))
            budget -= count
        return admitted

    def _fits(self, request: Request) -> bool:
        """Whether pages for all known tokens and for the adapter can be had without taking any in use."""
        wanted = -(-request.num_tokens // self._limits.block_tokens)
        available = self._pool.num_free + self._store.reclaimable_pages()
        adapter = request.adapter
        if adapter is not None:
            if not adapter.pages:
                wanted += adapter.num_pages
            elif adapter.references == 0:
                available -= len(adapter.pages)
        return wanted <= available

    def _start(self, request: Request, count: int) -> bool:
        """Pin the adapter and take pages for the first `count` tokens; on a broken adapter fail only this request."""
        if request.adapter is not None:
            try:
                self._store.acquire(request.adapter)
            except AdapterFormatError as error:
                self._fail(request, str(error))
                return False
            except Exception as error:
                logger.exception("loading %r failed", request.adapter)
                self._fail(request, f"adapter {request.adapter.name!r} was not loaded: {type(error).__name__}: {error}")
                return False
        request.block_table = BlockTable(self._pool, self._limits.block_tokens)
        self._grow(request, count)
        return True

    def _grow(self, request: Request, num_tokens: int) -> bool:
        """Make the block table cover `num_tokens`, evicting idle adapters if need be."""
        table = request.block_table
        if not self._store.make_room(table.missing_pages(num_tokens)):
            return False
        table.grow(num_tokens)
        return True

    def _preempt(self, request: Request) -> None:
        """Give back a running request's pages and pin; it recomputes prompt and output when it runs again.

        Draws depend on (seed, position) only, so what it already gave stays true.
        """
        self._release(request)
        request.num_computed_tokens = 0
        self._running.remove(request)
        self._waiting.appendleft(request)
        self.num_preemptions += 1

    # -- planning

    def _plan(self, chosen: list[tuple[Request, int]]) -> StepPlan:
        slots: dict[Adapter | None, int] = {None: BASE_SLOT}
        rows = []
        for request, count in chosen:
            slot = slots.setdefault(request.adapter, len(slots) - 1)
            start = request.num_computed_tokens
            last = start + count == request.num_tokens
            rows.append(
                ScheduledRow(
                    request_id=request.id,
                    slot=slot,
                    tokens=request.token_ids[start : start + count],
                    start=start,
                    pages=request.block_table.pages,
                    sampling=request.params if last else None,
                    seed=request.seed,
                )
            )
        rows.sort(key=lambda row: (len(row.tokens) == 1, row.slot))
        bucket = self._buckets.pick(len(rows)) if len(rows[0].tokens) == 1 else None
        return StepPlan(next(self._step_ids), rows, [a for a in slots if a is not None], bucket)

    # -- finishing

    def _append(self, request: Request, token: int, info: StepInfo) -> RequestOutput:
        request.token_ids.append(token)
        params, reason, stop_token = request.params, None, None
        ends = token in self._limits.eos_token_ids and not params.ignore_eos
        if ends or token in params.stop_token_ids:
            reason, stop_token = FinishReason.STOP, token
        elif request.num_output_tokens >= params.max_tokens or request.num_tokens >= self._limits.max_model_len:
            reason = FinishReason.LENGTH
        if reason is not None:
            self._finish(request, reason)
        return RequestOutput(request.id, (token,), reason, stop_token, step=info)

    def _fail(self, request: Request, error: str) -> None:
        """End a request that is in no queue."""
        request.finish_reason = FinishReason.ERROR
        del self._requests[request.id]
        self._failed.append(RequestOutput(request.id, (), FinishReason.ERROR, error=error))

    def _finish(self, request: Request, reason: FinishReason) -> None:
        request.finish_reason = reason
        del self._requests[request.id]
        if request.block_table is None:
            self._waiting.remove(request)
        else:
            self._running.remove(request)
            self._release(request)

    def _release(self, request: Request) -> None:
        request.block_table.free()
        request.block_table = None
        if request.adapter is not None:
            self._store.release(request.adapter)
