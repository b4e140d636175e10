"""Which waiting requests may begin."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable

from ..memory.adapter import Adapter, Tier
from ..memory.adapter_format import AdapterFormatError
from ..memory.adapter_store import AdapterStore
from ..memory.prefix import Block
from .load_policy import LoadPolicy
from .queue_order import queue_order
from .request import Request
from .request_memory import RequestMemory
from .running import Running
from .scheduler_limits import SchedulerLimits

logger = logging.getLogger(__name__)


class Admission:
    """Lets requests run while tokens, seats and pages last."""

    def __init__(
        self,
        limits: SchedulerLimits,
        store: AdapterStore,
        memory: RequestMemory,
        loads: LoadPolicy,
        clock: Callable[[], float],
        fail: Callable[[Request, str], None],
    ) -> None:
        """fail: ends a request that is in no queue, and says why."""
        self._limits = limits
        self._store = store
        self._memory = memory
        self._loads = loads
        self._clock = clock
        self._fail = fail
        self.num_cold_starts = 0  # requests whose adapter was not all there when they could begin

    def admit(self, waiting: deque[Request], running: Running, budget: int) -> dict[Request, int]:
        """Start waiting requests in queue order; those whose adapter is still being read are passed over.

        They go from `waiting` to `running`; returned with how many tokens each is to compute, of `budget` in all.
        The first that lacks pages or token budget ends it, so that a large request is not starved by small ones.
        """
        limits = self._limits
        admitted: dict[Request, int] = {}
        if budget <= 0 or len(running) >= limits.max_num_seqs:
            return admitted
        active = None
        if limits.max_adapters_per_step is not None:
            active = {request.adapter for request in running if request.adapter is not None}
        overdue_before = self._clock() - limits.max_overtake_seconds
        seats_left = False
        for request in queue_order(waiting, self._store, overdue_before):
            if budget <= 0 or len(running) >= limits.max_num_seqs:
                break
            adapter = request.adapter
            if adapter is not None and not self._may_run(request, adapter, active, running, budget):
                seats_left = True
                if request.arrival_time < overdue_before:
                    break
                continue
            blocks = self._memory.match(request)
            missing = request.num_tokens - len(blocks) * limits.block_tokens
            if missing > budget and not limits.chunked_prefill:
                break
            if not self._memory.fits(request, blocks):
                if running or self._store.has_transfers:
                    break
                waiting.remove(request)  # nobody will ever make more room than there is now
                self._fail(request, "the arena has too few pages left beside pinned adapters; unpin some")
                continue
            waiting.remove(request)
            count = min(missing, budget)
            if not self._start(request, blocks, count):
                continue
            running.append(request)
            admitted[request] = count
            budget -= count
            if active is not None and adapter is not None:
                active.add(adapter)
        else:
            seats_left = True
        if seats_left and waiting:
            self._note_cold(waiting)
        return admitted

    def _note_cold(self, waiting: Iterable[Request]) -> None:
        """Seats are free and requests wait: count those whose adapter is still to be read."""
        for request in waiting:
            adapter = request.adapter
            if adapter is None or request.had_to_wait or adapter.pages or self._store.tier(adapter) is Tier.HOST:
                continue
            self._count_cold(request)

    def _count_cold(self, request: Request) -> None:
        if not request.had_to_wait:
            request.had_to_wait = True
            self.num_cold_starts += 1

    def _may_run(
        self, request: Request, adapter: Adapter, active: set[Adapter] | None, running: Running, budget: int
    ) -> bool:
        """Whether a request may run now: its bytes come in time and one more adapter is allowed.

        active: those of the step so far, where their number is limited.
        """
        if active is not None and adapter not in active and len(active) >= self._limits.max_adapters_per_step:
            return False
        return self._loads.may_start(adapter, min(request.num_tokens, budget), alone=not running)

    def _start(self, request: Request, blocks: list[Block], count: int) -> bool:
        """Let a waiting request run; a broken adapter fails only this request."""
        if request.start_time is None:
            request.start_time = self._clock()
        try:
            self._memory.start(request, blocks, count)
        except Exception as error:
            self._fail(request, load_error(request, error))
            return False
        if request.adapter is not None and request.adapter.transfer is not None:
            self._count_cold(request)
        return True


def load_error(request: Request, error: BaseException) -> str:
    """What a request is told whose adapter was not loaded."""
    if isinstance(error, AdapterFormatError):
        return str(error)
    logger.error("loading %r failed", request.adapter, exc_info=error)
    return f"adapter {request.adapter_name!r} was not loaded: {type(error).__name__}: {error}"
