"""Order in which waiting requests are considered for admission: resident adapters first, overtaking bounded."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.store import AdapterStore
from ..requests.request import Request
from .policies import QueuePolicy
from .waiting import Group, WaitingQueue

OVERDUE, RESIDENT, COMING = range(3)


class QueueOrder:
    """Candidates for admission in one step.

    The policy chooses the tenant. Within a tenant, requests whose adapter is resident, or that need none, come first,
    then those whose adapter is being read, each in queue order. Those whose adapter is only on disk, or whose read has
    taken long and goes on, can't run and are left out. A request that arrived before `overdue_before` has been
    overtaken for long enough and goes first, whatever its adapter.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        policy: QueuePolicy,
        store: AdapterStore,
        overdue_before: float,
        may_run: Callable[[Adapter, Request], bool] | None = None,
        only_firsts: bool = False,
    ) -> None:
        """may_run: filters adapters; called with an adapter and its first waiting request. None: every adapter may.
        only_firsts: consider only the first answer of each call.
        """
        self._policy = policy
        self._overdue_before = overdue_before
        self.only_firsts = only_firsts
        self._tenants: dict[str, list[tuple[int, int, int, Group]]] = {}
        self._tenant = ""
        near: set[Adapter | None] | None = None
        most_near = 1 + store.most_near
        for tenant, groups in waiting.tenants.items():
            entries = []
            adapters: Collection[Adapter | None] = groups
            if len(groups) > most_near:  # most adapters are only on disk: list the others
                if near is None:
                    near = {None, *store.near()}
                adapters = near & groups.keys()
            for adapter in adapters:
                if adapter is None or adapter.pages:
                    kind = RESIDENT
                elif store.images.is_requested(adapter) and not store.images.is_slow(adapter):
                    kind = COMING
                else:
                    continue
                group = groups[adapter]
                if only_firsts and not group.firsts:
                    continue
                head = next(iter(group.firsts)) if only_firsts or not group.more else group.head
                if may_run is None or adapter is None or may_run(adapter, head):
                    entries.append((OVERDUE if head.arrival_time < overdue_before else kind, head.place, kind, group))
            if entries:
                heapq.heapify(entries)
                self._tenants[tenant] = entries

    def next(self) -> Request | None:
        """Return the next candidate; the same one until it has left its group, or its group is passed over."""
        if not self._tenants:
            return None
        if len(self._tenants) > 1:
            self._tenant = self._policy.order(self._tenants)
        else:
            (self._tenant,) = self._tenants
        return self._head(self._tenants[self._tenant][0][3])

    def is_overdue(self) -> bool:
        """True if the last candidate has been overtaken for long enough."""
        return self._tenants[self._tenant][0][0] == OVERDUE

    def go_on(self) -> None:
        """Go on to the next candidate, after the last one has left its group."""
        entries = self._tenants[self._tenant]
        _, _, kind, group = entries[0]
        if group.firsts or (group.more and not self.only_firsts):
            heapq.heapreplace(entries, self._entry(kind, self._head(group), group))
        else:
            self.pass_over()

    def pass_over(self) -> None:
        """Drop the last candidate's group from this step."""
        entries = self._tenants[self._tenant]
        heapq.heappop(entries)
        if not entries:
            del self._tenants[self._tenant]

    def _head(self, group: Group) -> Request:
        return next(iter(group.firsts)) if self.only_firsts else group.head

    def _entry(self, kind: int, head: Request, group: Group) -> tuple[int, int, int, Group]:
        """Return a heap entry; queue positions differ, so that groups are never compared."""
        return OVERDUE if head.arrival_time < self._overdue_before else kind, head.place, kind, group
