"""The order in which waiting requests are considered for admission in one step."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from ...memory.adapters.adapter import Adapter
from ..config import EngineConfig
from ..requests.request import Request
from .queues import AdapterQueue, WaitingQueue

if TYPE_CHECKING:  # an import that takes long, and `chorus` reads this module before it says anything
    from ...memory.adapters.store import AdapterStore

OVERDUE, RESIDENT, LOADING = range(3)

MANY = 64
"""With at least this many waiting tenants, first look for the tenants with an eligible request. Chosen."""

SHARE = 4
"""If at least one waiting tenant in this many has an eligible request, try all tenants: a hit comes soon. Chosen."""

Entry = tuple[int, int, int, AdapterQueue]
"""Class of the first request, its queue position, class of the adapter, the queue of this adapter."""


TurnKey = tuple[bool, float, float]
"""Sort key of a waiting tenant: False if it is overdue for its turn, its standing (0 if it is overdue), and the number
of its last turn or of its arrival.
"""


class SortedTenants:
    """Tenants sorted by a key, and how many of the first have been skipped.

    A change is a binary search and a move in memory, some microseconds for ten thousand tenants.
    """

    def __init__(self, keys: Mapping[str, tuple[float, ...]] = MappingProxyType({})) -> None:
        self.keys = dict(keys)
        self._sorted = sorted((key, tenant) for tenant, key in keys.items())
        self._num_skipped = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def put(self, tenant: str, key: tuple[float, ...]) -> None:
        """Enter a tenant, or move it."""
        self.drop(tenant)
        self.keys[tenant] = key
        index = bisect_left(self._sorted, (key, tenant))
        self._sorted.insert(index, (key, tenant))
        self._num_skipped += index < self._num_skipped

    def drop(self, tenant: str) -> None:
        """Remove a tenant, if it is there."""
        key = self.keys.pop(tenant, None)
        if key is not None:
            index = bisect_left(self._sorted, (key, tenant))
            del self._sorted[index]
            self._num_skipped -= index < self._num_skipped

    def restart(self) -> None:
        self._num_skipped = 0

    def first(self) -> str | None:
        return self._sorted[0][1] if self._sorted else None

    def top(self) -> str | None:
        """Return the first tenant that is not skipped; None if all are."""
        return self._sorted[self._num_skipped][1] if self._num_skipped < len(self._sorted) else None

    def skip(self) -> None:
        """Skip the tenant that `top` returned."""
        self._num_skipped += 1


class Turns:
    """Waiting tenants in order of their turns.

    First come overdue tenants, longest wait first: they have waited for `max_turn_seconds` or `max_turn_steps` since
    their last turn or, if later, since their queue was empty. Otherwise a small weight or a wrong length estimate could
    keep a tenant waiting for long. The others follow by the policy's standing, lowest first, then by arrival.
    """

    def __init__(self, limits: EngineConfig, waiting: WaitingQueue, standing: Callable[[str], float]) -> None:
        """standing: of a tenant with the policy (`QueuePolicy.standing`)."""
        self._max_seconds, self._max_steps = limits.max_turn_seconds, limits.max_turn_steps
        self._waiting = waiting
        self._standing = standing
        self._since = SortedTenants()  # by number, time and step of the last turn
        self._line = SortedTenants()  # by standing, and number of arrival; out of date until it comes to the top
        self._count = itertools.count()
        self._overdue_before = (-math.inf, -math.inf)
        self.is_overdue = False
        """True if the tenant that `top` returned last is overdue."""

    def record_turn(self, tenant: str, now: float, step: int) -> None:
        """Record that a tenant has a turn, or begins to wait for one."""
        self._since.put(tenant, (next(self._count), now, step))
        waiting = self._waiting.tenants
        for line in (self._since, self._line):
            if len(line) > 2 * len(waiting) + 64:  # tenants that wait no more
                for each in line.keys.keys() - waiting.keys():
                    line.drop(each)

    def note(self, tenant: str) -> None:
        """Update a tenant's turn after its standing with the policy may have changed."""
        key = self._line.keys.get(tenant)
        if key is not None and (standing := self._standing(tenant)) != key[0]:
            self._line.put(tenant, (standing, key[1]))

    def restart(self, now: float, step: int) -> None:
        """Begin with the first tenant again. now, step: the current time in seconds, and step number."""
        self._overdue_before = now - self._max_seconds, step - self._max_steps
        self._since.restart()
        self._line.restart()
        self._take_new(now, step)

    def least(self, now: float, step: int) -> float | None:
        """Return the lowest standing of any waiting tenant; None if none waits."""
        self._take_new(now, step)
        tenant = self._settled(self._line.first)
        return None if tenant is None else self._line.keys[tenant][0]

    def top(self) -> str | None:
        """Return the next tenant; None if all have been skipped."""
        while (tenant := self._since.top()) is not None and self._is_overdue(tenant):
            if tenant in self._waiting.tenants:
                self.is_overdue = True
                return tenant
            self._since.drop(tenant)
        self.is_overdue = False
        return self._settled(self._line.top)

    def pass_over(self) -> None:
        """Skip the tenant that `top` returned, until `restart`."""
        (self._since if self.is_overdue else self._line).skip()

    def key_of(self, tenant: str) -> TurnKey:
        """Return a waiting tenant's sort key in the order of turns."""
        if tenant in self._since.keys and self._is_overdue(tenant):
            return False, 0.0, self._since.keys[tenant][0]
        key = self._line.keys.get(tenant)  # None if it returns to the queue in this very step
        return True, self._standing(tenant), math.inf if key is None else key[1]

    def _is_overdue(self, tenant: str) -> bool:
        _, seconds, step = self._since.keys[tenant]
        return seconds <= self._overdue_before[0] or step <= self._overdue_before[1]

    def _settled(self, pick: Callable[[], str | None]) -> str | None:
        """Return the picked tenant, once it waits and its standing is up to date."""
        line = self._line
        while (tenant := pick()) is not None:
            if tenant not in self._waiting.tenants:
                line.drop(tenant)
            elif self._standing(tenant) > line.keys[tenant][0]:  # it has been charged since
                self.note(tenant)
            else:
                break
        return tenant

    def _take_new(self, now: float, step: int) -> None:
        """Enter the tenants that have begun to wait."""
        for tenant in self._waiting.pop_new_tenants():
            number = next(self._count)
            if tenant not in self._since.keys:
                self._since.put(tenant, (number, now, step))
            self._line.put(tenant, (self._standing(tenant), number))


class SomeTurns:
    """Some of the waiting tenants, in the current order of turns; `turns` has all of them, restarted."""

    def __init__(self, turns: Turns, waiting: WaitingQueue, tenants: Iterable[str]) -> None:
        self._turns = turns
        self._waiting = waiting
        self._line = SortedTenants({tenant: turns.key_of(tenant) for tenant in tenants})
        self.is_overdue = False

    def top(self) -> str | None:
        """Return the next tenant; None if all have been skipped."""
        line = self._line
        while (tenant := line.top()) is not None:
            if tenant not in self._waiting.tenants:
                line.drop(tenant)
            elif (rank := self._turns.key_of(tenant)) != line.keys[tenant]:  # it was charged for its turn
                line.put(tenant, rank)
            else:
                self.is_overdue = not rank[0]
                break
        return tenant

    def pass_over(self) -> None:
        self._line.skip()


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
