"""In which order waiting requests are considered for admission (papers/004: resident first, bounded)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection

from ..memory.adapter import Adapter
from ..memory.adapter_store import AdapterStore
from .queue_policy import QueuePolicy
from .request import Request
from .waiting import Group, WaitingQueue

OVERDUE, RESIDENT, COMING = range(3)


class QueueOrder:
    """The waiting requests as one step considers them.

    The policy says whose turn it is. Of one tenant come first the requests whose adapter is resident or that need none,
    then those whose adapter is on its way, each in the order of the queue; those whose adapter is on disk only can't
    run and are left out. But what came before `overdue_before` has been overtaken long enough: it goes before its
    tenant's others, whatever its adapter.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        policy: QueuePolicy,
        store: AdapterStore,
        overdue_before: float,
        may_run: Callable[[Adapter, Request], bool] | None = None,
    ) -> None:
        """may_run: whether an adapter that is not resident, or of which there may be too many, is worth a look; it is
        given its first waiting request. None: every adapter is."""
        self._policy = policy
        self._overdue_before = overdue_before
        self._tenants: dict[str, list[tuple[int, int, int, Group]]] = {}
        self._tenant = ""
        near: set[Adapter | None] | None = None
        most_near = 1 + store.most_near
        for tenant, groups in waiting.tenants.items():
            entries = []
            adapters: Collection[Adapter | None] = groups
            if len(groups) > most_near:  # most of them for adapters that are on disk only
                if near is None:
                    near = {None, *store.near()}
                adapters = near & groups.keys()
            for adapter in adapters:
                if adapter is None or adapter.pages:
                    kind = RESIDENT
                elif store.images.is_requested(adapter):
                    kind = COMING
                else:
                    continue
                group = groups[adapter]
                head = next(iter(group.requests))
                if may_run is None or adapter is None or may_run(adapter, head):
                    entries.append((OVERDUE if head.arrival_time < overdue_before else kind, head.place, kind, group))
            if entries:
                heapq.heapify(entries)
                self._tenants[tenant] = entries

    def next(self) -> Request | None:
        """Who is considered next; the same again until it has left its group, or its group is passed over."""
        if not self._tenants:
            return None
        if len(self._tenants) > 1:
            self._tenant = self._policy.order(self._tenants)
        else:
            (self._tenant,) = self._tenants
        return self._tenants[self._tenant][0][3].head

    def is_overdue(self) -> bool:
        """Of the one that `next` has named."""
        return self._tenants[self._tenant][0][0] == OVERDUE

    def go_on(self) -> None:
        """The one that `next` has named has left its group."""
        entries = self._tenants[self._tenant]
        _, _, kind, group = entries[0]
        if group.requests:
            heapq.heapreplace(entries, self._entry(kind, group.head, group))
        else:
            self.pass_over()

    def pass_over(self) -> None:
        """Consider no more of the group of the one that `next` has named."""
        entries = self._tenants[self._tenant]
        heapq.heappop(entries)
        if not entries:
            del self._tenants[self._tenant]

    def _entry(self, kind: int, head: Request, group: Group) -> tuple[int, int, int, Group]:
        """Places differ, so that groups are never compared."""
        return OVERDUE if head.arrival_time < self._overdue_before else kind, head.place, kind, group
