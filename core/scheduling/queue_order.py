"""The order in which waiting requests are considered for admission in one step."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.store import AdapterStore
from ..requests.request import Request
from .queues import AdapterQueue, WaitingQueue
from .service import SomeTurns, Turns

OVERDUE, RESIDENT, LOADING = range(3)

MANY = 64
"""With at least this many waiting tenants, first look for the tenants with an eligible request. Chosen."""

SHARE = 4
"""If at least one waiting tenant in this many has an eligible request, try all tenants: a hit comes soon. Chosen."""

Entry = tuple[int, int, int, AdapterQueue]
"""Class of the first request, its queue position, class of the adapter, the queue of this adapter."""


class QueueOrder:
    """Candidates for admission in one step.

    Tenants come in order of their turns. Within a tenant, requests for resident adapters and for the base model come
    first, then requests for adapters that are being read, each in queue order. A request is left out while no part of
    its adapter has been read, or while the read is slow and unfinished: it can't run. A request that arrived before
    `overdue_before` has been overtaken for long enough: it is the first of its tenant, whatever its adapter.

    If many tenants wait and few of them have an eligible request, only these few are tried.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        turns: Turns,
        store: AdapterStore,
        *,
        overdue_before: float,
        is_eligible: Callable[[Adapter | None, Request | None], bool] | None = None,
        may_begin: Callable[[str], bool] | None = None,
        only_first_choices: bool = False,
    ) -> None:
        """turns: just restarted.

        is_eligible: filters adapters. It gets an adapter (None: the base model) and the first request of a tenant that
        waits for it (None: of any tenant). Default: every adapter is eligible.

        may_begin: filters tenants, each time that one comes. Default: every tenant may begin a request.

        only_first_choices: consider only the first choice of each request with several.
        """
        self._waiting = waiting
        self.turns: Turns | SomeTurns = turns
        self._store = store
        self._overdue_before = overdue_before
        self._is_eligible = is_eligible
        self._only_first_choices = only_first_choices
        self._may_begin = may_begin
        resident, loading = store.near(waiting.by_adapter.keys())
        self._near: dict[Adapter | None, int] = {**dict.fromkeys(resident, RESIDENT), **dict.fromkeys(loading, LOADING)}
        if None in waiting.by_adapter:
            self._near[None] = RESIDENT
        if is_eligible is not None and not any(is_eligible(adapter, None) for adapter in self._near):
            self._near = {}  # no request can begin, and none needs an adapter index reserved
        self._entries: dict[str, list[Entry]] = {}  # of the tenants that have come to the top
        self._top: list[Entry] = []  # of the last candidate's tenant
        if len(waiting.tenants) >= MANY and (few := self._few()) is not None:
            self.turns = SomeTurns(turns, waiting, few)

    def next(self) -> Request | None:
        """Return the next candidate; the same request until it has left its queue, or its queue is skipped."""
        while (tenant := self.turns.top()) is not None:
            if self._may_begin is None or self._may_begin(tenant):
                entries = self._entries.get(tenant)
                if entries is None:
                    entries = self._entries[tenant] = self._open(self._waiting.tenants.get(tenant, {}))
                if entries:
                    self._top = entries
                    return next(iter(self._line(entries[0][3])))
            self.turns.pass_over()
        return None

    def advance(self) -> None:
        """Go on to the next candidate, after the last one has left its queue."""
        entries = self._top
        _, _, kind, queue = entries[0]
        if line := self._line(queue):
            heapq.heapreplace(entries, self._entry(kind, next(iter(line)), queue))
        else:
            self.pass_over()

    def pass_over(self) -> None:
        """Skip the queue of the last candidate for the rest of this step."""
        heapq.heappop(self._top)

    def _open(self, queues: dict[Adapter | None, AdapterQueue]) -> list[Entry]:
        """Return a tenant's eligible queues, as a heap."""
        entries: list[Entry] = []
        for adapter in self._near.keys() & queues.keys():
            queue = queues[adapter]
            head = next(iter(self._line(queue)), None)
            if head is not None and (self._is_eligible is None or self._is_eligible(adapter, head)):
                entries.append(self._entry(self._near[adapter], head, queue))
        heapq.heapify(entries)
        return entries

    def _few(self) -> set[str] | None:
        """Return the tenants with a request for a near adapter; None if there are many."""
        found: list[str] = []
        for adapter in self._near:
            found += self._waiting.by_adapter[adapter]
            if SHARE * len(found) >= len(self._waiting.tenants):
                return None
        return set(found)

    def _line(self, queue: AdapterQueue) -> Mapping[Request, None]:
        return queue.first_choices if self._only_first_choices else queue

    def _entry(self, kind: int, head: Request, queue: AdapterQueue) -> Entry:
        """Return a heap entry. Queue positions differ, hence queues are never compared."""
        return OVERDUE if head.arrival_time < self._overdue_before else kind, head.queue_position, kind, queue
