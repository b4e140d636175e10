"""Pages that running requests give to waiting ones in a step."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set

from ...memory.adapters.adapter import Adapter
from ..requests.request import Request
from .index_lending import is_eligible
from .lifecycle import Lifecycle
from .output_lengths import Growth
from .queues import Running


class PageLending:
    """Finds the requests to preempt for waiting ones, and the tenants that may begin nothing more."""

    __slots__ = (
        "_admitted",
        "_candidates",
        "_eligible",
        "_growth",
        "_lifecycle",
        "_running",
        "barred",
        "donors",
        "num_short",
    )

    def __init__(
        self,
        lifecycle: Lifecycle,
        running: Running,
        candidates: Sequence[Request],
        admitted: Set[Request],
        eligible: Collection[Adapter | None] | None,
    ) -> None:
        """candidates: the running requests that had a sequence in this step before requests were admitted.

        admitted: waiting requests that have begun; the caller changes it. eligible: adapters that may run; None: all.
        """
        self._lifecycle = lifecycle
        self._running = running
        self._candidates = candidates
        self._admitted = admitted
        self._eligible = eligible
        self._growth: Growth | None = None  # None: unknown
        self.num_short = 0
        """How often a waiting request lacked pages. From the first time on, no tenant begins requests beyond its share
        of the pages."""
        self.barred: set[str] = set()
        """Tenants that may begin no more requests: one of theirs lacked pages, or was preempted and would take them
        back."""
        self.donors: Set[str] = frozenset()
        """Tenants that gave pages in an earlier step. The recipient still waits for them, hence the donors begin
        nothing, unless they are overdue for a turn."""

    @property
    def growth(self) -> Growth:
        """Pages that the running requests are expected to grow by."""
        if self._growth is None:
            lifecycle = self._lifecycle
            self._growth = Growth(lifecycle.lengths, lifecycle.memory.layout, self._running)
        return self._growth

    def admit(self, request: Request) -> None:
        """Count the growth of a request that begins."""
        if self._growth is not None:
            self._growth.add(request)

    def bar(self, tenant: str) -> None:
        """Let a tenant whose request lacks pages begin no more requests."""
        self.barred.add(tenant)
        self.num_short += 1

    def note_victim(self, request: Request) -> None:
        """Record that a running request was preempted for a waiting one."""
        self._growth = None
        self.barred.add(request.fairness_key)

    def last_descheduled(self, tenant: str) -> Request | None:
        """Return the newest descheduled request of another tenant; None if there is none.

        Requests whose KV is being restored, and requests of ineligible adapters, keep their pages.
        """
        if len(self._candidates) >= len(self._running):
            return None
        scheduled = {*self._admitted, *self._candidates}
        for request in reversed(self._running):
            if is_eligible(request, self._eligible) and request not in scheduled and request.fairness_key != tenant:
                return request
        return None

    def from_end(self, tenants: Collection[str]) -> list[Request]:
        """Return the requests of some tenants that may be preempted, the last in the order first."""
        earlier = [each for each in self._earlier() if each.fairness_key in tenants]
        return self._lifecycle.service.order(earlier)[::-1]

    def last(self) -> Request | None:
        """Return the request to preempt for another tenant; None if its tenant would keep none."""
        earlier = self._earlier()
        victim = self._lifecycle.service.last(earlier) if len(earlier) > 1 else None
        if victim is None or victim is self._running[0] or self._running.tenants[victim.fairness_key] < 2:
            return None
        return victim

    def _earlier(self) -> list[Request]:
        """Return the running requests that had a sequence in this step before requests were admitted."""
        had = set(self._candidates) - self._admitted
        return [request for request in self._running if request in had]
