"""The waiting queue, by tenant and adapter, so that a step need not scan every request; and a step's order of it."""

from __future__ import annotations

import heapq
import itertools
import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.store import AdapterStore
from ..config import EngineConfig
from ..requests.request import Request

OVERDUE, RESIDENT, COMING = range(3)

MANY = 64
"""With at least this many waiting tenants, first look for the tenants with an eligible request. Chosen."""

SHARE = 4
"""If at least one waiting tenant in so many has one, all are tried in turn instead: a hit comes soon. Chosen."""

_BEFORE_ALL = 1 << 62  # subtracted from the places of requests that have run


class Group:
    """Waiting requests of one tenant for one adapter, in order."""

    __slots__ = ("adapter", "firsts", "more")

    def __init__(self, adapter: Adapter | None) -> None:
        self.adapter = adapter
        self.firsts: OrderedDict[Request, None] = OrderedDict()  # the first answer of each call
        self.more: OrderedDict[Request, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.firsts) + len(self.more)

    def __contains__(self, request: Request) -> bool:
        return request in self.line(request)

    def line(self, request: Request) -> OrderedDict[Request, None]:
        """Return the line that a request belongs to: first answers of calls, or further answers."""
        return self.more if request.is_further else self.firsts

    @property
    def head(self) -> Request:
        """The request that comes first."""
        if not self.more:
            return next(iter(self.firsts))
        further = next(iter(self.more))
        if not self.firsts:
            return further
        first = next(iter(self.firsts))
        return first if first.place < further.place else further


Entry = tuple[int, int, int, Group]
"""Class of a group's head, its queue position, class of the group's adapter, the group."""


class WaitingQueue(OrderedDict[Request, None]):
    """Waiting requests in order; only the methods here change it, which also maintain the groups.

    They take constant time, except that `append_first` and `release` scan the earlier requests.
    """

    def __init__(self) -> None:
        super().__init__()
        self._last = 0
        self._last_call = ""  # of the newest request: the answers of a call come one after another
        self.accounts: dict[str, dict[Adapter | None, Group]] = {}
        self.num_of: dict[Adapter | None, int] = {}
        """Number of requests by adapter (None: the base model), including held-back requests."""
        self.by_adapter: dict[Adapter | None, dict[str, None]] = {}
        """Tenants with candidates for an adapter, or for the base model."""
        self._new_accounts: dict[str, None] = {}
        self._held: dict[Request, None] = {}

    def has(self, account: str) -> bool:
        """True if a tenant has a waiting request, held back or not."""
        return account in self.accounts or any(request.account == account for request in self._held)

    def count(self, account: str) -> int:
        """Return the number of a tenant's waiting requests, without held-back ones; from any thread."""
        return sum(map(len, [*self.accounts.get(account, {}).values()]))

    def append(self, request: Request) -> None:
        """Add a new request at the end."""
        self._number(request)
        self[request] = None
        self._count(request)
        request.is_further = request.call != "" and request.call == self._last_call
        self._last_call = request.call
        self._group(request).line(request)[request] = None

    def append_first(self, request: Request) -> None:
        """Add a request that has run before: ahead of all new requests, in order of arrival among such requests."""
        if not request.place:  # it ran elsewhere
            self._number(request)
        if request.place > 0:
            request.place -= _BEFORE_ALL
        _insert(self, request)
        self._count(request)
        _insert(self._group(request).line(request), request)

    def remove(self, request: Request) -> None:
        del self[request]
        self.num_of[request.adapter] -= 1
        if not self.num_of[request.adapter]:
            del self.num_of[request.adapter]
        if request in self._held:
            del self._held[request]
        else:
            self._leave_group(request)

    def hold_back(self, request: Request) -> None:
        """Keep a request in the queue, but not among the candidates for admission, until it is released."""
        if request not in self._held:
            self._leave_group(request)
            self._held[request] = None

    def release(self, request: Request) -> None:
        """Make a held-back request a candidate again, at its position in its group, unless it has left the queue."""
        if request in self._held:
            del self._held[request]
            _insert(self._group(request).line(request), request)

    def take_new_accounts(self) -> list[str]:
        """Return the tenants that have become waiting since the last call, in order of arrival."""
        new, self._new_accounts = self._new_accounts, {}
        return list(new)

    def has_firsts(self) -> bool:
        """True if the first answer of a call is a candidate."""
        return any(group.firsts for groups in self.accounts.values() for group in groups.values())

    def has_absent(self) -> bool:
        """True if a request waits for an adapter without pages; looks at one such, and no more than are resident."""
        return any(adapter is not None and not adapter.pages for adapter in self.num_of)

    def adapters(self) -> set[Adapter]:
        """Return the adapters of all candidates for admission."""
        return {adapter for adapter in self.by_adapter if adapter is not None}

    def _number(self, request: Request) -> None:
        self._last += 1
        request.place = self._last

    def _count(self, request: Request) -> None:
        self.num_of[request.adapter] = self.num_of.get(request.adapter, 0) + 1

    def _group(self, request: Request) -> Group:
        groups = self.accounts.get(request.account)
        if groups is None:
            groups = self.accounts[request.account] = {}
            self._new_accounts[request.account] = None
        group = groups.get(request.adapter)
        if group is None:
            group = groups[request.adapter] = Group(request.adapter)
            self.by_adapter.setdefault(request.adapter, {})[request.account] = None
        return group

    def _leave_group(self, request: Request) -> None:
        groups = self.accounts[request.account]
        group = groups[request.adapter]
        del group.line(request)[request]
        if not group:
            del groups[request.adapter]
            accounts = self.by_adapter[request.adapter]
            del accounts[request.account]
            if not accounts:
                del self.by_adapter[request.adapter]
            if not groups:
                del self.accounts[request.account]
                self._new_accounts.pop(request.account, None)


Rank = tuple[bool, float, float]
"""Sort key of a waiting tenant: False if it is overdue for its turn, its standing (0 if it is overdue), and the number
of its last turn or of its arrival.
"""


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

    def __init__(self, limits: EngineConfig, waiting: WaitingQueue, standing: Callable[[str], float]) -> None:
        """standing: of a tenant with the policy (`QueuePolicy.standing`)."""
        self._max_seconds, self._max_steps = limits.max_turn_seconds, limits.max_turn_steps
        self._waiting = waiting
        self._standing = standing
        self._since = Line()  # by number, time and step of the last turn
        self._line = Line()  # by standing, and number of arrival; out of date until it comes to the top
        self._count = itertools.count()
        self._late_before = (-math.inf, -math.inf)
        self.is_late = False
        """True if the tenant that `top` returned last is overdue."""

    def record_turn(self, account: str, now: float, step: int) -> None:
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
        if key is not None and (standing := self._standing(account)) != key[0]:
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
        return True, self._standing(account), math.inf if key is None else key[1]

    def _is_late(self, account: str) -> bool:
        _, seconds, step = self._since.keys[account]
        return seconds <= self._late_before[0] or step <= self._late_before[1]

    def _settled(self, pick: Callable[[], str | None]) -> str | None:
        """Return the tenant that is picked from the line, once it waits and its standing is up to date."""
        line = self._line
        while (account := pick()) is not None:
            if account not in self._waiting.accounts:
                line.drop(account)
            elif self._standing(account) > line.keys[account][0]:  # it has been charged since
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
            self._line.put(account, (self._standing(account), number))


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


def _insert(requests: OrderedDict[Request, None], request: Request) -> None:
    """Insert a request by its position; few earlier ones are expected."""
    before = list(itertools.takewhile(lambda other: other.place < request.place, requests))
    requests[request] = None
    for earlier in (request, *reversed(before)):
        requests.move_to_end(earlier, last=False)
