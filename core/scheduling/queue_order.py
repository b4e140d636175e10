"""Order in which waiting requests are considered for admission: turns of accounts, resident adapters first."""

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
"""Standing of an account, its number in the order in which accounts came, the account."""

Since = tuple[float, int, int]
"""Time and step since when an account waits, and a number that grows in their order."""

MANY = 64
"""Accounts that wait from which on those are found first that have something that may run. Chosen."""

SHARE = 4
"""One of so many at least has, or all are looked at in turn: somebody is then found soon. Chosen."""


class Turns:
    """Accounts that wait, by whose turn it is.

    First come those that have waited too long for one, for `max_turn_seconds` or `max_turn_steps` since their last turn
    or, if later, since they had nothing waiting: a small weight, or a wrong guess of a length, might keep one waiting
    for long. Then come the others, those first that stand lowest with the policy, and of these those that came first.
    A change takes a time that grows with the logarithm of their number, since steps must not pay for who waits.
    """

    def __init__(self, limits: EngineConfig, waiting: WaitingQueue, policy: QueuePolicy) -> None:
        self._max_seconds, self._max_steps = limits.max_turn_seconds, limits.max_turn_steps
        self._waiting = waiting
        self._policy = policy
        self._since: OrderedDict[str, Since] = OrderedDict()  # who has waited longest first
        self._heap: list[Turn] = []
        self._turns: dict[str, Turn] = {}  # of the heap's entries those that hold
        self._count = itertools.count()
        self._late_before = (-math.inf, -math.inf)
        self._passed: list[Turn] = []  # a heap, too: of those that are not looked at again until `restart`
        self._passed_late: list[tuple[str, Since]] = []
        self.is_late = False
        """True if the account that `top` returned last has waited too long."""

    def take(self, account: str, now: float, step: int) -> None:
        """Note that an account has a turn, or begins to wait for one."""
        self._since[account] = now, step, next(self._count)
        self._since.move_to_end(account)
        self._bound()

    def note(self, account: str) -> None:
        """Note that the policy may think better of an account than before."""
        turn = self._turns.get(account)
        if turn is not None and self._policy.standing(account) < turn[0]:
            self._enter(self._heap, account, turn[1])
            self._bound()

    def restart(self, now: float, step: int) -> None:
        """Begin with the first account again. now, step: of the moment, in seconds and steps."""
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
        """Return the lowest standing of all that wait; None if nobody does. Who has been passed over stays so."""
        self._take_new(self._passed, now, step)
        return min((turn[0] for heap in (self._heap, self._passed) if (turn := self._first(heap))), default=None)

    def top(self) -> str | None:
        """Return the account whose turn it is; None if all have been passed over."""
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
        """Go on to the next account, until `restart`."""
        if self.is_late:
            self._passed_late.append(self._since.popitem(last=False))
        else:
            heapq.heappush(self._passed, heapq.heappop(self._heap))

    def rank(self, account: str) -> tuple[bool, float, float]:
        """Return a key by which accounts that wait are in the order of turns; False first: it has waited too long."""
        since = self._since.get(account)
        if since is not None and self._is_late(since):
            return False, 0.0, since[2]
        turn = self._turns.get(account)  # None for one that comes back in this very step
        return True, self._policy.standing(account), math.inf if turn is None else turn[1]

    def _is_late(self, since: Since) -> bool:
        return since[0] <= self._late_before[0] or since[1] <= self._late_before[1]

    def _first(self, heap: list[Turn]) -> Turn | None:
        """Return the least of a heap's turns that hold; None if there is none."""
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
        """Give those a turn that have begun to wait."""
        for account in self._waiting.take_new_accounts():
            number = next(self._count)
            self._since.setdefault(account, (now, step, number))
            self._enter(heap, account, number)

    def _enter(self, heap: list[Turn], account: str, number: int) -> None:
        turn = self._turns[account] = self._policy.standing(account), number, account
        heapq.heappush(heap, turn)

    def _bound(self) -> None:
        """Forget accounts that wait no more and turns that hold no more, when they are many."""
        accounts = self._waiting.accounts
        if max(len(self._since), len(self._heap)) <= 2 * len(accounts) + 64:
            return
        self._since = OrderedDict((account, since) for account, since in self._since.items() if account in accounts)
        self._turns = {account: turn for account, turn in self._turns.items() if account in accounts}
        passed = {turn[2] for turn in self._passed}
        self._heap = [turn for account, turn in self._turns.items() if account not in passed]
        heapq.heapify(self._heap)


class SomeTurns:
    """Some of the accounts that wait, in the order of turns as of the moment; `turns` has all of them, restarted."""

    def __init__(self, turns: Turns, waiting: WaitingQueue, accounts: Iterable[str]) -> None:
        self._turns = turns
        self._waiting = waiting
        self._heap = [(turns.rank(account), account) for account in accounts]
        heapq.heapify(self._heap)
        self._last = ""  # what `top` returned, the only one whose rank may have changed since
        self.is_late = False

    def top(self) -> str | None:
        """Return the account whose turn it is; None if all have been passed over."""
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

    Whose turn it is comes first. Within an account, requests whose adapter is resident, or that need none, come first,
    then those whose adapter is being read, each in queue order. Those of whose adapter nothing has been read, or whose
    read has taken long and goes on, can't run and are left out. A request that arrived before `overdue_before` has been
    overtaken for long enough and goes first in its account, whatever its adapter.

    Where many accounts wait and few of them have a request that can run, only these are looked at.
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
        """turns: restarted. may_run: filters adapters; called with an adapter, or None for the base model, and the
        first request of an account that waits for it, or None for any. None: every adapter may. only_firsts: consider
        only the first answer of each call. may_begin: filters accounts; None: every one may. held: accounts that are
        left out, more and more of them.
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
            self._near = {}  # no request can begin, and none needs an adapter place kept
        self._entries: dict[str, list[Entry]] = {}  # of accounts that have come to the top
        self._account = ""  # of the last candidate
        if len(waiting.accounts) >= MANY and (few := self._few()) is not None:
            self._turns = SomeTurns(turns, waiting, few)

    def next(self) -> Request | None:
        """Return the next candidate; the same one until it has left its group, or its group is passed over."""
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
        """True if the last candidate's account has waited too long for a turn."""
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
        """Return an account's groups that may run, as a heap."""
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
        """Return the accounts that have something that may run; None where these are many."""
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
