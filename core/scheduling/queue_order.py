"""Order in which waiting requests are considered for admission: turns of tenants, resident adapters first."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.store import AdapterStore
from ..config import EngineConfig
from ..requests.request import Request
from .policies import QueuePolicy
from .waiting import Group, WaitingQueue

OVERDUE, RESIDENT, COMING = range(3)

Entry = tuple[int, int, int, Group]
"""Class of a group's head, its queue position, class of the group's adapter, the group."""

Rank = tuple[bool, float, float]
"""Sort key of a waiting tenant: False if it is overdue for its turn, its standing (0 if it is overdue), and the number
of its last turn or of its arrival.
"""

MANY = 64
"""With at least this many waiting tenants, first look for the tenants with an eligible request. Chosen."""

SHARE = 4
"""If at least one waiting tenant in so many has one, all are tried in turn instead: a hit comes soon. Chosen."""


class Line:
    """Tenants sorted by a key, and how many of the first have been skipped.

    A change is a binary search and a move in memory, some microseconds for ten thousand tenants.
    """

    def __init__(self, keys: Mapping[str, tuple[float, ...]] = MappingProxyType({})) -> None:
        self.keys = dict(keys)
        self._sorted = sorted((key, account) for account, key in keys.items())
        self._num_skipped = 0

    def __len__(self) -> int:
        return len(self._sorted)

    def put(self, account: str, key: tuple[float, ...]) -> None:
        """Enter a tenant, or move it."""
        self.drop(account)
        self.keys[account] = key
        index = bisect_left(self._sorted, (key, account))
        self._sorted.insert(index, (key, account))
        self._num_skipped += index < self._num_skipped

    def drop(self, account: str) -> None:
        """Remove a tenant, if it is there."""
        key = self.keys.pop(account, None)
        if key is not None:
            index = bisect_left(self._sorted, (key, account))
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

    def __init__(self, limits: EngineConfig, waiting: WaitingQueue, policy: QueuePolicy) -> None:
        self._max_seconds, self._max_steps = limits.max_turn_seconds, limits.max_turn_steps
        self._waiting = waiting
        self._policy = policy
        self._since = Line()  # by number, time and step of the last turn
        self._line = Line()  # by standing, and number of arrival; out of date until it comes to the top
        self._count = itertools.count()
        self._late_before = (-math.inf, -math.inf)
        self.is_late = False
        """True if the tenant that `top` returned last is overdue."""

    def take(self, account: str, now: float, step: int) -> None:
        """Record that a tenant has a turn, or begins to wait for one."""
        self._since.put(account, (next(self._count), now, step))
        waiting = self._waiting.accounts
        for line in (self._since, self._line):
            if len(line) > 2 * len(waiting) + 64:  # tenants that wait no more
                for each in line.keys.keys() - waiting.keys():
                    line.drop(each)

    def note(self, account: str) -> None:
        """Update a tenant's turn after its standing with the policy may have changed."""
        key = self._line.keys.get(account)
        if key is not None and (standing := self._policy.standing(account)) != key[0]:
            self._line.put(account, (standing, key[1]))

    def restart(self, now: float, step: int) -> None:
        """Begin with the first tenant again. now, step: the current time in seconds, and step number."""
        self._late_before = now - self._max_seconds, step - self._max_steps
        self._since.restart()
        self._line.restart()
        self._take_new(now, step)

    def least(self, now: float, step: int) -> float | None:
        """Return the lowest standing of any waiting tenant; None if none waits."""
        self._take_new(now, step)
        account = self._settled(self._line.first)
        return None if account is None else self._line.keys[account][0]

    def top(self) -> str | None:
        """Return the next tenant; None if all have been skipped."""
        while (account := self._since.top()) is not None and self._is_late(account):
            if account in self._waiting.accounts:
                self.is_late = True
                return account
            self._since.drop(account)
        self.is_late = False
        return self._settled(self._line.top)

    def pass_over(self) -> None:
        """Skip the tenant that `top` returned, until `restart`."""
        (self._since if self.is_late else self._line).skip()

    def rank(self, account: str) -> Rank:
        """Return a waiting tenant's sort key in the order of turns."""
        if account in self._since.keys and self._is_late(account):
            return False, 0.0, self._since.keys[account][0]
        key = self._line.keys.get(account)  # None if it returns to the queue in this very step
        return True, self._policy.standing(account), math.inf if key is None else key[1]

    def _is_late(self, account: str) -> bool:
        _, seconds, step = self._since.keys[account]
        return seconds <= self._late_before[0] or step <= self._late_before[1]

    def _settled(self, pick: Callable[[], str | None]) -> str | None:
        """Return the tenant that is picked from the line, once it waits and its standing is up to date."""
        line = self._line
        while (account := pick()) is not None:
            if account not in self._waiting.accounts:
                line.drop(account)
            elif self._policy.standing(account) > line.keys[account][0]:  # it has been charged since
                self.note(account)
            else:
                break
        return account

    def _take_new(self, now: float, step: int) -> None:
        """Enter the tenants that have begun to wait."""
        for account in self._waiting.take_new_accounts():
            number = next(self._count)
            if account not in self._since.keys:
                self._since.put(account, (number, now, step))
            self._line.put(account, (self._policy.standing(account), number))


class SomeTurns:
    """Some of the waiting tenants, in the current order of turns; `turns` has all of them, restarted."""

    def __init__(self, turns: Turns, waiting: WaitingQueue, accounts: Iterable[str]) -> None:
        self._turns = turns
        self._waiting = waiting
        self._line = Line({account: turns.rank(account) for account in accounts})
        self._last = ""  # returned by `top`: only its rank may have changed since
        self.is_late = False

    def top(self) -> str | None:
        """Return the next tenant; None if all have been skipped."""
        line = self._line
        while (account := line.top()) is not None:
            rank = self._turns.rank(account) if account == self._last else line.keys[account]
            if account not in self._waiting.accounts:
                line.drop(account)
            elif rank != line.keys[account]:  # it was charged for its turn
                line.put(account, rank)
            else:
                self._last, self.is_late = account, not rank[0]
                break
        return account

    def pass_over(self) -> None:
        self._line.skip()


class QueueOrder:
    """Candidates for admission in one step.

    Tenants come in order of their turns. Within a tenant, requests for resident adapters and for the base model come
    first, then requests for adapters being read, each in queue order. A request can't run, and is left out, while no
    part of its adapter has been read, or while the read is slow and unfinished. A request that arrived before
    `overdue_before` has been overtaken for long enough: it goes first in its tenant, whatever its adapter.

    Where many tenants wait and few of them have an eligible request, only these few are tried.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        turns: Turns,
        store: AdapterStore,
        overdue_before: float,
        may_run: Callable[[Adapter | None, Request | None], bool] | None = None,
        only_firsts: bool = False,
        may_begin: Callable[[str], bool] | None = None,
    ) -> None:
        """turns: restarted. may_run: filters adapters; called with an adapter (None: the base model) and the first
        request of a tenant that waits for it (None: of any tenant). None: every adapter is eligible. only_firsts:
        consider only the first answer of each call. may_begin: filters tenants, each time that one comes; None:
        every tenant is eligible.
        """
        self._waiting = waiting
        self._turns: Turns | SomeTurns = turns
        self._store = store
        self._overdue_before = overdue_before
        self._may_run = may_run
        self._only_firsts = only_firsts
        self._may_begin = may_begin
        resident, coming = store.near(waiting.by_adapter.keys())
        self._near: dict[Adapter | None, int] = {**dict.fromkeys(resident, RESIDENT), **dict.fromkeys(coming, COMING)}
        if None in waiting.by_adapter:
            self._near[None] = RESIDENT
        if may_run is not None and not any(may_run(adapter, None) for adapter in self._near):
            self._near = {}  # no request can begin, and none needs an adapter slot reserved
        self._entries: dict[str, list[Entry]] = {}  # of tenants that have come to the top
        self._account = ""  # of the last candidate
        if len(waiting.accounts) >= MANY and (few := self._few()) is not None:
            self._turns = SomeTurns(turns, waiting, few)

    def next(self) -> Request | None:
        """Return the next candidate; the same request until it has left its group, or its group is skipped."""
        while (account := self._turns.top()) is not None:
            if self._may_begin is None or self._may_begin(account):
                entries = self._entries.get(account)
                if entries is None:
                    entries = self._entries[account] = self._open(self._waiting.accounts.get(account, {}))
                if entries:
                    self._account = account
                    return self._head(entries[0][3])
            self._turns.pass_over()
        return None

    def is_overdue(self) -> bool:
        """True if the last candidate has been overtaken for long enough."""
        return self._top()[0][0] == OVERDUE

    def is_late(self) -> bool:
        """True if the last candidate's tenant is overdue for a turn."""
        return self._turns.is_late

    def go_on(self) -> None:
        """Go on to the next candidate, after the last one has left its group."""
        entries = self._top()
        _, _, kind, group = entries[0]
        if group.firsts or (group.more and not self._only_firsts):
            heapq.heapreplace(entries, self._entry(kind, self._head(group), group))
        else:
            self.pass_over()

    def pass_over(self) -> None:
        """Drop the last candidate's group from this step."""
        heapq.heappop(self._top())

    def _top(self) -> list[Entry]:
        return self._entries[self._account]

    def _open(self, groups: dict[Adapter | None, Group]) -> list[Entry]:
        """Return a tenant's eligible groups, as a heap."""
        only_firsts = self._only_firsts
        entries: list[Entry] = []
        for adapter in self._near.keys() & groups.keys():
            group = groups[adapter]
            if only_firsts and not group.firsts:
                continue
            head = self._head(group)
            if self._may_run is None or self._may_run(adapter, head):
                entries.append(self._entry(self._near[adapter], head, group))
        heapq.heapify(entries)
        return entries

    def _few(self) -> set[str] | None:
        """Return the tenants with a request for a near adapter; None if these are many."""
        found: list[str] = []
        for adapter in self._near:
            found += self._waiting.by_adapter[adapter]
            if SHARE * len(found) >= len(self._waiting.accounts):
                return None
        return set(found)

    def _head(self, group: Group) -> Request:
        return next(iter(group.firsts)) if self._only_firsts or not group.more else group.head

    def _entry(self, kind: int, head: Request, group: Group) -> Entry:
        """Return a heap entry; queue positions differ, so that groups are never compared."""
        return OVERDUE if head.arrival_time < self._overdue_before else kind, head.place, kind, group
