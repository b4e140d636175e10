"""Which waiting requests may begin."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from ..memory.adapter import Adapter, Tier
from ..memory.adapter_error import AdapterFormatError, LoadFailure
from ..memory.adapter_store import AdapterStore
from ..memory.prefix import Block
from .load_policy import LoadPolicy
from .output_lengths import OutputLengths
from .queue_order import QueueOrder
from .queue_policy import QueuePolicy
from .request import Request, RequestState
from .request_memory import RequestMemory
from .running import Running
from .scheduler_limits import SchedulerLimits
from .shared_prefills import SharedPrefills
from .waiting import WaitingQueue

logger = logging.getLogger(__name__)

DOUBT_SECONDS = 10.0
"""Seconds for which no request starts before its adapter has been read, once one did not come in time."""

_AWAY = (Tier.DISK, Tier.LOADING)


class Admission:
    """Lets requests run while tokens, seats and pages last."""

    def __init__(
        self,
        limits: SchedulerLimits,
        waiting: WaitingQueue,
        policy: QueuePolicy,
        store: AdapterStore,
        memory: RequestMemory,
        loads: LoadPolicy,
        lengths: OutputLengths,
        clock: Callable[[], float],
        fail: Callable[[Request, str], None],
    ) -> None:
        """fail: ends a request that is in no queue, and says why."""
        self._limits = limits
        self._waiting = waiting
        self._policy = policy
        self._store = store
        self._memory = memory
        self._loads = loads
        self._lengths = lengths
        self._clock = clock
        self._fail = fail
        self._prefills = SharedPrefills(memory, waiting, limits.block_tokens)
        self._late: set[Adapter] = set()  # did not come in time: no request starts before all of it has been read
        self._doubt_until = 0.0
        self.awaits_growth = False  # the last `admit` ended for what is expected to grow, which may differ in any step
        self.num_cold_starts = 0  # requests whose adapter was not all there when they could begin

    def settle(self) -> None:
        """Take note of what has ended since the last step."""
        if self._prefills:
            self._prefills.settle()
        if self._late:
            self._late = {adapter for adapter in self._late if adapter.requests and not self._is_here(adapter)}

    def note_late(self, adapter: Adapter) -> None:
        """An adapter did not come in time: estimates of reads are wrong, and for a while none is believed."""
        self._late.add(adapter)
        self._doubt_until = self._clock() + DOUBT_SECONDS

    def admit(self, running: Running, budget: int) -> dict[Request, int]:
        """Start waiting requests in queue order; those whose adapter is still being read are passed over.

        They go from the queue to `running`; returned with how many tokens each is to compute, of `budget` in all.
        The first that lacks pages or token budget ends it, so that a large request is not starved by small ones: pages
        for what it has, and for what it and those that run are expected to grow by.
        """
        limits, waiting = self._limits, self._waiting
        admitted: dict[Request, int] = {}
        seats = limits.max_num_seqs
        self.awaits_growth = False
        if budget <= 0 or len(running) >= seats:
            return admitted
        now = self._clock()
        active = None
        most_adapters = limits.max_adapters_per_step
        if most_adapters is not None:
            active = {request.adapter for request in running if request.adapter is not None}
        overdue_before, doubt = now - limits.max_overtake_seconds, now < self._doubt_until
        reserved = math.inf  # place of the first that is overdue and waits only for one adapter fewer in the step

        def is_barred(adapter: Adapter) -> bool:
            return active is not None and adapter not in active and len(active) >= most_adapters

        def may_come(adapter: Adapter, head: Request) -> bool:
            nonlocal reserved
            if is_barred(adapter):
                if head.arrival_time < overdue_before and self._is_here(adapter):
                    reserved = min(reserved, head.place)
                return False
            if adapter in self._late or (doubt and not adapter.pages):
                return self._is_here(adapter)
            return True

        is_limited = active is not None or bool(self._late) or doubt
        order = QueueOrder(waiting, self._policy, self._store, overdue_before, may_come if is_limited else None)
        growth: int | None = None
        seats_left = False
        while (request := order.next()) is not None:
            if budget <= 0 or len(running) >= seats:
                break
            adapter = request.adapter
            if adapter is not None and is_barred(adapter):
                if order.is_overdue():
                    reserved = min(reserved, request.place)
                seats_left = True
                order.pass_over()
                continue
            if reserved < request.place and (adapter is not None or len(running) >= seats - 1):
                seats_left = True
                order.pass_over()
                continue
            if adapter is not None and not self._loads.may_start(
                adapter, min(request.num_tokens, budget), alone=not running
            ):
                seats_left = True
                order.pass_over()
                continue
            blocks = self._memory.match(request)
            missing = request.num_tokens - len(blocks) * limits.block_tokens
            if missing > budget and not limits.chunked_prefill:
                break
            if self._prefills.wait(request, len(blocks)):
                order.go_on()
                continue
            if not self._memory.fits(request, blocks):
                if self._store.give_up_loads():
                    continue
                if running or self._store.has_transfers:
                    break
                waiting.remove(request)  # nobody will ever make more room than there is now
                order.go_on()
                self._fail(request, "the arena has too few pages left beside pinned adapters; unpin some")
                continue
            if running:
                if growth is None:
                    growth = self._lengths.growth_of(running)
                block = limits.block_tokens
                own = -(-(self._lengths.final_length(request) - 1) // block) - -(-request.num_tokens // block)
                if not self._memory.fits(request, blocks, growth + max(0, own)) and not self._memory.fits(
                    request, blocks, self._lengths.peak_growth(running, request)
                ):
                    if self._store.give_up_loads():
                        continue
                    self.awaits_growth = True
                    break
            waiting.remove(request)
            order.go_on()
            count = min(missing, budget)
            if not self._start(request, blocks, count):
                continue
            running.append(request)
            admitted[request] = count
            budget -= count
            growth = None if growth is None else growth + self._lengths.growth(request)
            if active is not None and adapter is not None:
                active.add(adapter)
        else:
            seats_left = True
        if seats_left and waiting:
            self._note_cold()
        return admitted

    def _is_here(self, adapter: Adapter) -> bool:
        """True if nothing of it is still to be read."""
        return self._store.tier(adapter) not in _AWAY

    def _note_cold(self) -> None:
        """Seats are free and requests wait: count those whose adapter is still to be read."""
        unnoted = self._waiting.unnoted
        for group in list(unnoted):
            if group.adapter.pages or self._store.tier(group.adapter) is Tier.HOST:
                continue  # it may be on disk only by the time that it could run
            for request in reversed(group.requests):
                if request.place <= group.noted:
                    break
                self._count_cold(request)
            group.noted = next(reversed(group.requests)).place
            del unnoted[group]

    def _count_cold(self, request: Request) -> None:
        if not request.had_to_wait:
            request.had_to_wait = True
            self.num_cold_starts += 1

    def _start(self, request: Request, blocks: list[Block], count: int) -> bool:
        """Let a waiting request run; a broken adapter fails only this request."""
        if request.start_time is None:
            request.start_time = self._clock()
        try:
            self._memory.start(request, blocks, count)
        except Exception as error:
            self._fail(request, *load_error(request, error))
            return False
        request.state = RequestState.RUNNING
        if request.adapter is not None and request.adapter.transfer is not None:
            self._count_cold(request)
            request.state = RequestState.LOADING
        request.began_at = request.num_computed_tokens
        request.charged = self._lengths.final_length(request) - 1 - request.began_at
        self._policy.charge(request, request.charged)
        self._prefills.begin(request)
        return True


def load_error(request: Request, error: BaseException) -> tuple[str, LoadFailure | None]:
    """The message for a request whose adapter was not loaded, and why it was not, unless that is our own fault."""
    if isinstance(error, AdapterFormatError):
        return str(error), error.failure
    logger.error("loading %r failed", request.adapter, exc_info=error)
    failure = LoadFailure.UNREADABLE if isinstance(error, OSError) else None
    return f"adapter {request.adapter_name!r} was not loaded: {type(error).__name__}: {error}", failure
