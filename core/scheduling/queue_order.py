"""Order in which waiting requests are considered for admission: turns of tenants, resident adapters first."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Container, Iterable

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.store import AdapterStore
from ..config import EngineConfig
from ..requests.request import Request
from .policies import QueuePolicy
from .waiting import Group, WaitingQueue

OVERDUE, RESIDENT, COMING = range(3)

Entry = tuple[int, int, int, Group]
"""Class of a group's head, its queue position, class of the group's adapter, the group."""

Turn = tuple[float, int, str]
"""Standing of a tenant, its number in order of arrival, the tenant."""

Since = tuple[float, int, int]
"""Time and step since which a tenant waits, and a sequence number."""

MANY = 64
"""With at least this many waiting tenants, first look for the tenants with an eligible request. Chosen."""

SHARE = 4
"""If at least one waiting tenant in so many has one, all are tried in turn instead: a hit comes soon. Chosen."""


class Turns:
    """Waiting tenants in order of their turns.

    First come overdue tenants, longest wait first: they have waited for `max_turn_seconds` or `max_turn_steps` since
    their last turn or, if later, since their queue was empty. Otherwise a small weight or a wrong length estimate could
    keep a tenant waiting for long. The others follow by the policy's standing, lowest first, then by arrival. A change
    takes time logarithmic in the number of tenants, so that a long queue does not slow steps down.
    """

    def __init__(self, limits: EngineConfig, waiting: WaitingQueue, policy: QueuePolicy) -> None:
        self._max_seconds, self._max_steps = limits.max_turn_seconds, limits.max_turn_steps
        self._waiting = waiting
        self._policy = policy
        self._since: OrderedDict[str, Since] = OrderedDict()  # longest wait first
        self._heap: list[Turn] = []
        self._turns: dict[str, Turn] = {}  # the valid entries of both heaps
        self._count = itertools.count()
        self._late_before = (-math.inf, -math.inf)
        self._passed: list[Turn] = []  # a heap, too: turns skipped until `restart`
        self._passed_late: list[tuple[str, Since]] = []
        self.is_late = False
        """True if the tenant that `top` returned last is overdue."""

    def take(self, account: str, now: float, step: int) -> None:
        """Record that a tenant has a turn, or begins to wait for one."""
        self._since[account] = now, step, next(self._count)
        self._since.move_to_end(account)
        self._bound()

    def note(self, account: str) -> None:
        """Update a tenant's turn after its standing with the policy may have fallen."""
        turn = self._turns.get(account)
        if turn is not None and self._policy.standing(account) < turn[0]:
            self._enter(self._heap, account, turn[1])
            self._bound()

    def restart(self, now: float, step: int) -> None:
        """Begin with the first tenant again. now, step: the current time in seconds, and step number."""
        self._late_before = now - self._max_seconds, step - self._max_steps
        for account, since in reversed(self._passed_late):
            if account not in self._since:
                self._since[account] = since
                self._since.move_to_end(account, last=False)
        for turn in self._passed:
            if self._turns.get(turn[2]) is turn:
                heapq.heappush(self._heap, turn)
        self._passed_late, self._passed = [], []
        self._take_new(self._heap, now, step)

    def least(self, now: float, step: int) -> float | None:
        """Return the lowest standing of any waiting tenant; None if none waits. Skipped tenants stay skipped."""
        self._take_new(self._passed, now, step)
        return min((turn[0] for heap in (self._heap, self._passed) if (turn := self._first(heap))), default=None)

    def top(self) -> str | None:
        """Return the next tenant; None if all have been skipped."""
        accounts, since = self._waiting.accounts, self._since
        while since:
            account = next(iter(since))
            if not self._is_late(since[account]):
                break
            if account in accounts:
                self.is_late = True
                return account
            del since[account]
        self.is_late = False
        turn = self._first(self._heap)
        return None if turn is None else turn[2]

    def pass_over(self) -> None:
        """Skip the tenant that `top` returned, until `restart`."""
        if self.is_late:
            self._passed_late.append(self._since.popitem(last=False))
        else:
            heapq.heappush(self._passed, heapq.heappop(self._heap))

    def rank(self, account: str) -> tuple[bool, float, float]:
        """Return a waiting tenant's sort key in the order of turns; its first item is False for an overdue tenant."""
        since = self._since.get(account)
        if since is not None and self._is_late(since):
            return False, 0.0, since[2]
        turn = self._turns.get(account)  # None if it returns to the queue in this very step
        return True, self._policy.standing(account), math.inf if turn is None else turn[1]

    def _is_late(self, since: Since) -> bool:
        return since[0] <= self._late_before[0] or since[1] <= self._late_before[1]

    def _first(self, heap: list[Turn]) -> Turn | None:
        """Return the least valid turn of a heap; None if there is none."""
        while heap:
            turn = heap[0]
            account = turn[2]
            if self._turns.get(account) is not turn:
                heapq.heappop(heap)
            elif account not in self._waiting.accounts:
                heapq.heappop(heap)
                del self._turns[account]
            elif self._policy.standing(account) > turn[0]:  # it has been charged since
                heapq.heappop(heap)
                self._enter(heap, account, turn[1])
            else:
                return turn
        return None

    def _take_new(self, heap: list[Turn], now: float, step: int) -> None:
        """Enter the tenants that have begun to wait."""
        for account in self._waiting.take_new_accounts():
            number = next(self._count)
            self._since.setdefault(account, (now, step, number))
            self._enter(heap, account, number)

    def _enter(self, heap: list[Turn], account: str, number: int) -> None:
        turn = self._turns[account] = self._policy.standing(account), number, account
        heapq.heappush(heap, turn)

    def _bound(self) -> None:
        """Once they are many, drop tenants that no longer wait and stale turns."""
        accounts = self._waiting.accounts
        if max(len(self._since), len(self._heap)) <= 2 * len(accounts) + 64:
            return
        self._since = OrderedDict((account, since) for account, since in self._since.items() if account in accounts)
        self._turns = {account: turn for account, turn in self._turns.items() if account in accounts}
        passed = {turn[2] for turn in self._passed}
        self._heap = [turn for account, turn in self._turns.items() if account not in passed]
        heapq.heapify(self._heap)


class SomeTurns:
    """Some of the waiting tenants, in the current order of turns; `turns` has all of them, restarted."""

    def __init__(self, turns: Turns, waiting: WaitingQueue, accounts: Iterable[str]) -> None:
        self._turns = turns
        self._waiting = waiting
        self._heap = [(turns.rank(account), account) for account in accounts]
        heapq.heapify(self._heap)
        self._last = ""  # returned by `top`: only its rank may have changed since
        self.is_late = False

    def top(self) -> str | None:
        """Return the next tenant; None if all have been skipped."""
        heap = self._heap
        while heap:
            rank, account = heap[0]
            if account not in self._waiting.accounts:
                heapq.heappop(heap)
            elif account == self._last and (now := self._turns.rank(account)) != rank:  # it was charged for its turn
                heapq.heapreplace(heap, (now, account))
            else:
                self._last, self.is_late = account, not rank[0]
                return account
        return None

    def pass_over(self) -> None:
        heapq.heappop(self._heap)


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
        held: Container[str] = (),
    ) -> None:
        """turns: restarted. may_run: filters adapters; called with an adapter (None: the base model) and the first
        request of a tenant that waits for it (None: of any tenant). None: every adapter is eligible. only_firsts:
        consider only the first answer of each call. may_begin: filters tenants; None: every tenant is eligible. held:
        excluded tenants; the caller adds to it during the step.
        """
        self._waiting = waiting
        self._turns: Turns | SomeTurns = turns
        self._store = store
        self._overdue_before = overdue_before
        self._may_run = may_run
        self._only_firsts = only_firsts
        self._may_begin = may_begin
        self._held = held
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
            if account not in self._held and (self._may_begin is None or self._may_begin(account)):
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
