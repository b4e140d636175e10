"""Life cycle of requests: into the queues, from one to the other, a step further, and out.

Tests: tests/core/scheduling/test_scheduling.py, tests/simulation/test_simulation.py
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ...memory.adapters.store import AdapterStore
from ...memory.files.error import AdapterFormatError, LoadFailure
from ...memory.transfers.transfer import ExecutorLost
from ..config import EngineConfig
from ..requests.pooling import to_bytes
from ..requests.request import Request, RequestState
from ..requests.types import NOT_FINITE, FinishReason, RequestOutput, StepInfo, StepResult, TokenLogprobs
from .overload import check_bounds
from .queues import Running, WaitingQueue
from .request_memory import RequestMemory
from .service import Service

logger = logging.getLogger(__name__)


class QueueRoom:
    """Limit of the waiting queue, shared by tenants."""

    def __init__(self, most: int | None, clock: Callable[[], float]) -> None:
        """most: requests that may wait; None: no limit."""
        self._most = most
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=64)  # when the latest requests ended

    def note_end(self) -> None:
        """Record that a running request has ended."""
        self._ends.append(self._clock())

    def check(self, queue: WaitingQueue, tenant: str, count: int = 1) -> None:
        """Raise Overloaded when there is no room for `count` more requests of `tenant`.

        A tenant's waiting requests must not outnumber the free places, so that new tenants find room. Changes
        nothing, so that any thread may look before it makes requests.
        """
        waiting = len(queue) + count - 1  # when the last of them is queued
        if self._most is None or waiting < self._most // 2:
            return
        own = queue.count(tenant) + count - 1 if tenant else 0
        check_bounds(waiting, own, self._most, lambda: self._seconds_to_drain(waiting / 4))

    def _seconds_to_drain(self, count: float) -> float:
        """Return how long `count` waiting requests take to start, by the recent rate; from 1 to 60 seconds."""
        ends = self._ends
        if len(ends) < 2:
            return 1.0
        rate = (len(ends) - 1) / max(1e-9, self._clock() - ends[0])
        return min(60.0, max(1.0, count / rate))


@dataclass(eq=False)
class Lifecycle:
    """Puts requests into the waiting queue, sends running ones back to it, advances them by steps, and ends them.

    A request that stops running frees all its memory, and its tenant is charged for the tokens it computed. A subclass,
    such as the simulator's, may override the public methods.

    requests: in progress, by id. ended_outside_steps: outputs of requests that no step's result has ended.
    """

    limits: EngineConfig
    waiting: WaitingQueue
    running: Running
    service: Service
    store: AdapterStore
    memory: RequestMemory
    clock: Callable[[], float]
    requests: dict[str, Request] = field(default_factory=dict)
    ended_outside_steps: list[RequestOutput] = field(default_factory=list)
    num_preemptions: int = 0
    note_answer: Callable[[Request], None] | None = None
    """Called with each request that ends."""

    def __post_init__(self) -> None:
        self.room = QueueRoom(self.limits.max_waiting, self.clock)

    def add(self, request: Request) -> None:
        """Queue a validated request; one that has run on another engine goes first."""
        self.requests[request.id] = request
        self.service.arrive(request.fairness_key)
        (self.waiting.append_first if request.num_paid_tokens else self.waiting.append)(request)
        if request.adapter is not None:
            self.store.hold(request.adapter)

    def preempt(self, request: Request) -> None:
        """Preempt a running request; its KV comes back from host memory, or is computed again, when it runs again.

        Sampling depends on (seed, position) only, so the tokens it has already returned stay valid.
        """
        self.send_back(request, RequestState.SWAPPED)
        request.num_preemptions += 1
        self.num_preemptions += 1

    def send_back(self, request: Request, state: RequestState) -> None:
        """Free the memory of a running request, and put it at the head of the queue.

        Its KV may be kept in host memory.
        """
        self.running.remove(request)
        if not self.memory.swap_out(request):
            request.forget_prompt()
        self._release(request)
        request.state = state
        request.num_computed_tokens = 0
        self.service.arrive(request.fairness_key)
        self.waiting.append_first(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request in either queue; the caller has its output."""
        if request.is_running:
            self.running.remove(request)
            self._release(request)
            self.room.note_end()
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                if request.adapter is not None:
                    request.adapter.num_overflows = None
                if request.params.pooling is None:
                    self.service.lengths.end(request.num_output_tokens, reason is FinishReason.LENGTH)
        else:
            self.waiting.remove(request)
        request.finish_reason, request.state = reason, RequestState.DONE
        request.media_rows.clear()  # others' images wait for that memory
        del self.requests[request.id]
        if self.note_answer is not None:
            self.note_answer(request)
        self.memory.forget_image(request)
        if request.adapter is not None:
            self.store.let_go(request.adapter)

    def end(self, request: Request, error: str, failure: LoadFailure | None) -> None:
        """End a request in either queue with an error; its output is in `ended_outside_steps`."""
        self.finish(request, FinishReason.ERROR)
        self.ended_outside_steps.append(self._failed(request, error, failure))

    def _failed(
        self, request: Request, error: str, failure: LoadFailure | None, step: StepInfo | None = None
    ) -> RequestOutput:
        """Return the output of a request that has failed."""
        seconds = self.memory.page_seconds(request)
        reason = FinishReason.ERROR
        return RequestOutput(request.id, (), reason, error=error, step=step, failure=failure, page_seconds=seconds)

    def _release(self, request: Request) -> None:
        """Free the memory of a request that no longer runs, and charge its tenant for the tokens it computed."""
        self.service.end(request)
        self.memory.release(request)

    # -- a step's result

    def note_extras(self, request: Request, result: StepResult, info: StepInfo, outputs: list[RequestOutput]) -> bool:
        """Apply a request's error, prompt logprobs and pooled states; False if its sequence produced nothing."""
        if request.id in result.unready:
            return False
        if error := result.errors.get(request.id):
            self.finish(request, FinishReason.ERROR)
            overflows = error == NOT_FINITE and request.adapter is not None
            outputs.append(self._failed(request, error, LoadFailure.OVERFLOWS if overflows else None, info))
            return False
        request.prompt_logprobs += result.prompt_logprobs.get(request.id, ())
        if (pooled := result.pooled.get(request.id)) is not None:
            request.pooled = pooled.plus(request.pooled)
        return True

    def report(
        self,
        request: Request,
        token: int,
        info: StepInfo,
        reason: FinishReason | None,
        logprobs: TokenLogprobs | None,
        *,
        is_first: bool,
    ) -> RequestOutput:
        """End a request that is done (`reason`), and return the output of its sampled token."""
        if reason is not None:
            self.finish(request, reason)
        return RequestOutput(
            request_id=request.id,
            token_ids=(token,),
            finish_reason=reason,
            stop_token_id=token if reason is FinishReason.STOP else None,
            step=info,
            logprobs=(logprobs,) if logprobs else (),
            num_preemptions=request.num_preemptions,
            page_seconds=self.memory.page_seconds(request),
            **(_reported_once(request) if is_first else {}),
        )

    def pool(self, request: Request, info: StepInfo) -> RequestOutput | None:
        """End a pooling request once its prompt is computed, and return its output; None for other requests."""
        if request.pooled is None or request.num_computed_tokens < request.num_prompt_tokens:
            return None
        vector = request.pooled.mean()
        self.finish(request, FinishReason.STOP)
        return RequestOutput(
            request.id,
            (),
            FinishReason.STOP,
            step=info,
            num_preemptions=request.num_preemptions,
            page_seconds=self.memory.page_seconds(request),
            pooled=to_bytes(vector if request.head is None else request.head.scores(vector)),
            **_reported_once(request),
        )


def _reported_once(request: Request) -> dict[str, Any]:
    """Return the fields of a request's first output that no later output has."""
    wants_logprobs = request.params.prompt_logprobs is not None
    return {
        "num_cached_tokens": request.num_cached_tokens,
        "prompt_logprobs": tuple(request.prompt_logprobs) if wants_logprobs else None,
        "queue_seconds": None if request.start_time is None else request.start_time - request.arrival_time,
    }


def load_error(request: Request, error: BaseException) -> tuple[str, LoadFailure | None]:
    """Return the error of a request with an unloadable adapter, and the cause; None for a fault of our own.

    ExecutorLost is raised again: it affects more than this request.
    """
    if isinstance(error, ExecutorLost):
        raise error
    if isinstance(error, AdapterFormatError):
        return str(error), error.failure
    logger.error("loading %r failed", request.adapter, exc_info=error)
    failure = LoadFailure.UNREADABLE if isinstance(error, OSError) else None
    return f"adapter {request.adapter_name!r} was not loaded: {type(error).__name__}: {error}", failure
