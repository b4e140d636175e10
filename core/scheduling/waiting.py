"""The waiting queue: in order of arrival, and by tenant and adapter, so that a step need not scan every request."""

from __future__ import annotations

from collections import OrderedDict
from itertools import takewhile

from ...memory.adapters.adapter import Adapter
from ..requests.request import Request

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
        self.release(request)

    def remove(self, request: Request) -> None:
        del self[request]
        self.num_of[request.adapter] -= 1
        if not self.num_of[request.adapter]:
            del self.num_of[request.adapter]
        self._leave_group(request)

    def hold_back(self, request: Request) -> None:
        """Keep a request in the queue, but not among the candidates for admission, until it is released."""
        self._leave_group(request)

    def release(self, request: Request) -> None:
        """Make a held-back request a candidate again, at its position in its group, unless it has left the queue."""
        if request in self:
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
        groups = self.accounts.get(request.account)
        group = None if groups is None else groups.get(request.adapter)
        if groups is None or group is None or request not in group:
            return
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


def _insert(requests: OrderedDict[Request, None], request: Request) -> None:
    """Insert a request by its position; few earlier ones are expected."""
    before = list(takewhile(lambda other: other.place < request.place, requests))
    requests[request] = None
    for earlier in (request, *reversed(before)):
        requests.move_to_end(earlier, last=False)
