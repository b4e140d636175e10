"""Life cycle of requests: into the queues, from one to the other, and out.

Tests: tests/core/scheduling/test_scheduling.py, tests/simulation/test_simulation.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from ...memory.adapters.store import AdapterStore
from ...memory.files.error import AdapterFormatError, LoadFailure
from ...memory.transfers.transfer import ExecutorLost
from ..config import EngineConfig
from ..requests.request import Request, RequestState
from ..requests.types import FinishReason, RequestOutput
from .output_lengths import OutputLengths
from .overload import QueueRoom
from .queues import Running, WaitingQueue
from .request_memory import RequestMemory
from .service import Service

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Lifecycle:
    """Puts requests into the waiting queue, sends running ones back to it, and ends them.

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
    lengths: OutputLengths = field(default_factory=OutputLengths)
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
                    self.lengths.end(request.num_output_tokens, reason is FinishReason.LENGTH)
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
        output = RequestOutput(
            request.id,
            (),
            FinishReason.ERROR,
            error=error,
            failure=failure,
            page_seconds=self.memory.page_seconds(request),
        )
        self.ended_outside_steps.append(output)

    def _release(self, request: Request) -> None:
        """Free the memory of a request that no longer runs, and charge its tenant for the tokens it computed."""
        self.service.end(request)
        self.memory.release(request)


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
