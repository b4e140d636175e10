"""Order in which waiting requests are considered for admission: turns of accounts, resident adapters first."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.store import AdapterStore
from ..config import EngineConfig
from ..requests.request import Request
from .policies import QueuePolicy
from .waiting import Group, WaitingQueue

OVERDUE, RESIDENT, COMING = range(3)

Entry = tuple[int, int, int, Group]
"""Class of a group's head, its queue position, class of the group's adapter, the group."""


class Turns:
    """Times since which accounts wait for a turn: their last one or, if later, when they had nothing waiting.

    The policy decides by what accounts were given; a small weight, or a wrong guess of a length, might keep one waiting
    for long. So one that has waited for `max_turn_seconds` or `max_turn_steps` has the next turn whatever its standing.
    """

    def __init__(self, limits: EngineConfig) -> None:
        self._max_seconds, self._max_steps = limits.max_turn_seconds, limits.max_turn_steps
        self._since: dict[str, tuple[float, int]] = {}

    def take(self, account: str, now: float, step: int) -> None:
        """Note that an account has a turn, or begins to wait for one."""
        self._since[account] = now, step

    def late(self, accounts: Collection[str], now: float, step: int) -> dict[str, float]:
        """Return those of `accounts`, which wait, that have waited too long, and since when."""
        since = self._since
        if len(since) > 2 * len(accounts) + 64:
            since = self._since = {account: since[account] for account in accounts if account in since}
        before, before_step = now - self._max_seconds, step - self._max_steps
        late = {}
        for account in accounts:
            began, at = since.setdefault(account, (now, step))
            if began <= before or at <= before_step:
                late[account] = began
        return late


class QueueOrder:
    """Candidates for admission in one step.

    Whose turn it is comes first: that of an account that has waited too long for one, else of the one that stands
    lowest with the policy. Within an account, requests whose adapter is resident, or that need none, come first, then
    those whose adapter is being read, each in queue order. Those whose adapter is only on disk, or whose read has taken
    long and goes on, can't run and are left out. A request that arrived before `overdue_before` has been overtaken for
    long enough and goes first in its account, whatever its adapter.
    """

    def __init__(
        self,
        waiting: WaitingQueue,
        policy: QueuePolicy,
        store: AdapterStore,
        overdue_before: float,
        may_run: Callable[[Adapter, Request], bool] | None = None,
        only_firsts: bool = False,
        late: dict[str, float] | None = None,
        may_begin: Callable[[str], bool] | None = None,
    ) -> None:
        """may_run: filters adapters; called with an adapter and its first waiting request. None: every adapter may.
        only_firsts: consider only the first answer of each call. late: accounts that have waited too long for a turn,
        and since when. may_begin: filters accounts; None: every one may.
        """
        self._waiting = waiting
        self._policy = policy
        self._store = store
        self._overdue_before = overdue_before
        self._may_run = may_run
        self.only_firsts = only_firsts
        self._late = late or {}
        self._may_begin = may_begin
        self._near: set[Adapter | None] | None = None
        self._entries: dict[str, list[Entry]] = {}  # of accounts that have come to the top
        accounts = waiting.accounts
        self._turns = [(*self._turn(account), index, account) for index, account in enumerate(accounts)]
        heapq.heapify(self._turns)

    def next(self) -> Request | None:
        """Return the next candidate; the same one until it has left its group, or its group is passed over."""
        turns = self._turns
        while turns:
            *turn, index, account = turns[0]
            now = self._turn(account)
            if now > tuple(turn):  # it has been charged since
                heapq.heapreplace(turns, (*now, index, account))
                continue
            if self._may_begin is not None and not self._may_begin(account):
                heapq.heappop(turns)
                continue
            entries = self._entries.get(account)
            if entries is None:
                entries = self._entries[account] = self._open(self._waiting.accounts.get(account, {}))
            if entries:
                return self._head(entries[0][3])
            heapq.heappop(turns)
        return None

    def is_overdue(self) -> bool:
        """True if the last candidate has been overtaken for long enough."""
        return self._top()[0][0] == OVERDUE

    def is_late(self) -> bool:
        """True if the last candidate's account has waited too long for a turn."""
        return self._turns[0][3] in self._late

    def end_turn(self, account: str) -> None:
        """Note that a request of an account has begun, which so has had the turn that it waited for."""
        self._late.pop(account, None)

    def go_on(self) -> None:
        """Go on to the next candidate, after the last one has left its group."""
        entries = self._top()
        _, _, kind, group = entries[0]
        if group.firsts or (group.more and not self.only_firsts):
            heapq.heapreplace(entries, self._entry(kind, self._head(group), group))
        else:
            self.pass_over()

    def pass_over(self) -> None:
        """Drop the last candidate's group from this step."""
        heapq.heappop(self._top())

    def _top(self) -> list[Entry]:
        return self._entries[self._turns[0][3]]

    def _turn(self, account: str) -> tuple[int, float]:
        """Return a key by which accounts have their turns."""
        since = self._late.get(account)
        return (1, self._policy.standing(account)) if since is None else (0, since)

    def _open(self, groups: dict[Adapter | None, Group]) -> list[Entry]:
        """Return an account's groups that may run, as a heap."""
        store, only_firsts = self._store, self.only_firsts
        adapters: Collection[Adapter | None] = groups
        if len(groups) > 1 + store.most_near:  # most adapters are only on disk: list the others
            if self._near is None:
                self._near = {None, *store.near()}
            adapters = self._near & groups.keys()
        entries: list[Entry] = []
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
            head = self._head(group)
            if self._may_run is None or adapter is None or self._may_run(adapter, head):
                entries.append(self._entry(kind, head, group))
        heapq.heapify(entries)
        return entries

    def _head(self, group: Group) -> Request:
        return next(iter(group.firsts)) if self.only_firsts or not group.more else group.head

    def _entry(self, kind: int, head: Request, group: Group) -> Entry:
        """Return a heap entry; queue positions differ, so that groups are never compared."""
        return OVERDUE if head.arrival_time < self._overdue_before else kind, head.place, kind, group
