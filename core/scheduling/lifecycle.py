"""Ways of requests into the queues, from one to the other, and out."""

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
from .policies import QueuePolicy
from .request_memory import RequestMemory
from .running import Running
from .service import Service, Turns
from .waiting import WaitingQueue

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Lifecycle:
    """Puts requests into the waiting queue, sends running ones back to it, and ends them.

    A request that leaves the running ones gives up all that it holds, and its tenant is charged for what it computed. A
    subclass, such as the simulator's, may override what is documented here.

    _now: the time, and the number of steps so far, by which turns go. requests: in progress, by id. failed: outputs of
    requests that have ended outside of a step's result.
    """

    _limits: EngineConfig
    _waiting: WaitingQueue
    _running: Running
    _service: Service
    policy: QueuePolicy
    store: AdapterStore
    memory: RequestMemory
    _now: Callable[[], tuple[float, int]]
    _clock: Callable[[], float]
    requests: dict[str, Request] = field(default_factory=dict)
    lengths: OutputLengths = field(default_factory=OutputLengths)
    failed: list[RequestOutput] = field(default_factory=list)
    num_preemptions: int = 0

    def __post_init__(self) -> None:
        self.turns = Turns(self._limits, self._waiting, self.policy)
        self.room = QueueRoom(self._limits.max_waiting, self._clock)

    def add(self, request: Request) -> None:
        """Queue a validated request; one that has run on another engine goes first."""
        self.requests[request.id] = request
        self._arrive(request.account)
        (self._waiting.append_first if request.num_paid_tokens else self._waiting.append)(request)
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
        """Free all that a running request holds, which may keep its KV in host memory, and put it at the head of the
        queue.
        """
        self._running.remove(request)
        if not self.memory.swap_out(request):
            request.prompt_logprobs.clear()
        self._release(request)
        request.state = state
        request.num_computed_tokens = 0
        self._arrive(request.account)
        self._waiting.append_first(request)

    def finish(self, request: Request, reason: FinishReason) -> None:
        """End a request, whichever queue it is in; the caller has its output."""
        if request.is_running:
            self._running.remove(request)
            self._release(request)
            self.room.note_end()
            if reason in (FinishReason.STOP, FinishReason.LENGTH):
                if request.adapter is not None:
                    request.adapter.num_overflows = None
                self.lengths.end(request.num_output_tokens, reason is FinishReason.LENGTH)
        else:
            self._waiting.remove(request)
        request.finish_reason, request.state = reason, RequestState.DONE
        del self.requests[request.id]
        self.memory.forget_image(request)
        if request.adapter is not None:
            self.store.let_go(request.adapter)

    def end(self, request: Request, error: str, failure: LoadFailure | None) -> None:
        """End a request with an error, whichever queue it is in; its output is among `failed`."""
        self.finish(request, FinishReason.ERROR)
        self.failed.append(RequestOutput(request.id, (), FinishReason.ERROR, error=error, failure=failure))

    def charge(self, request: Request) -> None:
        """Charge the tenant of a request that begins, for its expected length, and for a turn."""
        self.policy.charge(request, self.lengths.final_length(request) - 1)
        self.turns.record_turn(request.account, *self._now())

    def restart_turns(self) -> Turns:
        """Return the turns of the waiting tenants, from the first on."""
        self.turns.restart(*self._now())
        return self.turns

    def _arrive(self, account: str) -> None:
        """If a tenant's queue was empty, enter the tenant with the policy and in the order of turns."""
        if not self._waiting.has(account):
            now = self._now()
            self.policy.arrive(account, self._waiting.accounts, self.turns.least(*now))
            self.turns.record_turn(account, *now)

    def _release(self, request: Request) -> None:
        """Free all that a request which has left the running ones holds, and charge its tenant for what it computed."""
        expected = request.charged
        self.policy.settle(request)
        self._service.end(request, expected)
        self.turns.note(request.account)
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
