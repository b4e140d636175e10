"""The waiting queue, by tenant and adapter, so that a step need not scan every request; and a step's order of it."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable
from itertools import takewhile

from ...memory.adapters.adapter import Adapter
from ...memory.adapters.store import AdapterStore
from ..requests.request import Request
from .service import SomeTurns, Turns

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
    before = list(takewhile(lambda other: other.place < request.place, requests))
    requests[request] = None
    for earlier in (request, *reversed(before)):
        requests.move_to_end(earlier, last=False)
