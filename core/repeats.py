"""How often a decode step may be repeated before anything is to be decided anew: what makes simulated hours short."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..memory.adapter import Tier
from ..memory.adapter_store import AdapterStore
from .load_ahead import LoadAhead
from .request import Request
from .request_memory import RequestMemory
from .scheduler_limits import SchedulerLimits
from .types import StepPlan
from .waiting import WaitingQueue


class Repeats:
    """Counts the steps that a scheduler would decide just like the last one."""

    def __init__(
        self,
        limits: SchedulerLimits,
        store: AdapterStore,
        memory: RequestMemory,
        ahead: LoadAhead,
        clock: Callable[[], float],
    ) -> None:
        self._limits = limits
        self._store = store
        self._memory = memory
        self._ahead = ahead
        self._clock = clock

    def count(self, plan: StepPlan, running: Sequence[Request], waiting: WaitingQueue) -> int:
        """Steps from a decode step of all running requests to the next decision, but for arrivals and aborts.

        Each of them has told its first token. Nothing is decided until a request ends or pages run short. What waiting
        requests' adapters hold is not touched, since that would change what is read ahead and who comes first.
        """
        most = self._limits.max_repeat
        for request in running:
            left = request.max_length - len(request.token_ids)
            if left < most:
                most = left
        if most == 1 or self._store.has_transfers:
            return 1
        seats = len(running) < self._limits.max_num_seqs
        if waiting and (self._ahead.may_load(waiting) or (seats and not self._stay_waiting(plan, waiting))):
            return 1
        return self._memory.most_steps(running, most, waiting.adapters())

    def _stay_waiting(self, plan: StepPlan, waiting: WaitingQueue) -> bool:
        """True if those who could not be admitted now can't be while no running request ends; sets `plan.until`.

        Running requests only take pages, so what did not fit won't. But the order changes when a request has been
        overtaken for long enough, an adapter that has been read may be loaded, and known blocks may be shared.
        """
        if self._memory.caches_prefixes:
            return False
        overdue_before = self._clock() - self._limits.max_overtake_seconds
        for request in waiting:
            if request.adapter is not None and self._store.tier(request.adapter) is Tier.LOADING:
                return False
            if request.arrival_time >= overdue_before:
                plan.until = min(plan.until, request.arrival_time + self._limits.max_overtake_seconds)
        return True
