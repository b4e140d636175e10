"""Indices of a batch that one adapter gives to another when a step has all the adapters that it may have."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from ...memory.adapters.adapter import Adapter
from ..requests.request import Request
from .adapter_turns import AdapterTurns
from .queues import Running
from .service import Service


class IndexLending:
    """Tracks the adapters of a step, at most `max_adapters_per_step`, and who gives an index to whom.

    A waiting request of an adapter without an index may begin once it is overdue (`AdapterTurns`): then the sequences
    of the donor are descheduled. If a request is preempted for a waiting one, its index is free from the next step on.
    """

    __slots__ = ("_adapters", "_candidates", "_donors", "_is_open", "_now", "_running", "_service", "_turns")

    def __init__(
        self, turns: AdapterTurns, service: Service, running: Running, candidates: Sequence[Request], now: float
    ) -> None:
        """candidates: the running requests that have a sequence in this step."""
        self._turns = turns
        self._service = service
        self._running = running
        self._candidates = candidates
        self._now = now
        self._adapters: set[Adapter] = set()
        if turns.most is not None:
            self._adapters = {request.adapter for request in candidates if request.adapter is not None}
        self._donors: list[Adapter] | None = None  # the last in the order of slots first; None: unknown
        self._is_open = True

    def lacks_index(self, adapter: Adapter) -> bool:
        """True if every index of the step belongs to another adapter."""
        most, adapters = self._turns.most, self._adapters
        return most is not None and adapter not in adapters and len(adapters) >= most

    @property
    def has_donor(self) -> bool:
        """True if an adapter may give its index to a waiting request."""
        return bool(self._find_donors())

    def has_donor_for(self, adapter: Adapter, head: Request) -> bool:
        """True if another adapter may give its index to an adapter without one. head: the first request for it.

        If the adapter has running sequences, these have their turn first.
        """
        if adapter in self._running.by_adapter() or not self._turns.is_overdue(adapter, head.arrival_time, self._now):
            return False
        return self.has_donor

    def has_donor_for_any(self, waiting: Iterable[Request], overdue_before: float) -> bool:
        """True if a waiting request may be overdue for an index, and an adapter has one to give."""
        if self._turns.most is None or not self._is_open or len(self._adapters) < self._turns.most:
            return False
        oldest = next(iter(waiting), None)
        is_overdue = oldest is not None and oldest.arrival_time < overdue_before
        return is_overdue and self.has_donor

    def close(self) -> None:
        """Give no more indices in this step: no waiting request is left that could get one."""
        self._is_open = False

    def count_left_out(self, eligible: Collection[Adapter | None] | None) -> int:
        """Count the running sequences that are descheduled because their adapters have no index: they use no slot.

        eligible: adapters that may run; None: all.
        """
        most, adapters = self._turns.most, self._adapters
        if most is None or len(adapters) < most:
            return 0
        left_out = [
            group for adapter, group in self._running.by_adapter().items() if adapter and adapter not in adapters
        ]
        return sum(is_eligible(request, eligible) for group in left_out for request in group)

    def admit(self, adapter: Adapter) -> Adapter | None:
        """Give an index to the adapter of a request that begins; return the donor, if it needs one."""
        donor = self._take() if self.lacks_index(adapter) else None
        self._adapters.add(adapter)
        return donor

    def _take(self) -> Adapter:
        self._turns.note_taken()
        donor = self._find_donors().pop(0)
        self._adapters.remove(donor)
        return donor

    def _find_donors(self) -> list[Adapter]:
        if self._donors is None:
            self._donors = self._turns.donors(self._candidates, self._service.order, self._now)
        return self._donors


def is_eligible(request: Request, adapters: Collection[Adapter | None] | None) -> bool:
    """True unless a running request's KV is still being restored, or its adapter is none of `adapters` (None: all)."""
    return request.restoring is None and (adapters is None or request.adapter in adapters)
