"""The waiting queue: in order of arrival, and by tenant and adapter, so that a step need not scan every request."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import takewhile

from ..memory.adapter import Adapter
from .request import Request

_BEFORE_ALL = 1 << 62  # subtracted from the places of requests that have run


class Group:
    """Waiting requests of one tenant for one adapter, in order."""

    __slots__ = ("adapter", "requests")

    def __init__(self, adapter: Adapter | None) -> None:
        self.adapter = adapter
        self.requests: OrderedDict[Request, None] = OrderedDict()

    @property
    def head(self) -> Request:
        return next(iter(self.requests))


class WaitingQueue:
    """Waiting requests. Operations take constant time, but `append_first` scans the requests that came back before."""

    def __init__(self) -> None:
        self._order: OrderedDict[Request, None] = OrderedDict()
        self._last = 0
        self.tenants: dict[str, dict[Adapter | None, Group]] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)

    def __contains__(self, request: Request) -> bool:
        return request in self._order

    def count(self, tenant: str) -> int:
        """Return the number of a tenant's waiting requests, without those held back."""
        return sum(len(group.requests) for group in self.tenants.get(tenant, {}).values())

    def append(self, request: Request) -> None:
        """Add a new request at the end."""
        self._last += 1
        request.place = self._last
        self._order[request] = None
        self._group(request).requests[request] = None

    def append_first(self, request: Request) -> None:
        """Add a request that has run: before all that have not, and among those that have in order of arrival."""
        if request.place > 0:
            request.place -= _BEFORE_ALL
        _insert(self._order, request)
        self.release(request)

    def remove(self, request: Request) -> None:
        del self._order[request]
        self._leave_group(request)

    def hold_back(self, request: Request) -> None:
        """Keep a request in the queue, but not among the candidates for admission, until it is released."""
        self._leave_group(request)

    def release(self, request: Request) -> None:
        """Make a held-back request a candidate at its place in its group. Does nothing if it has left the queue."""
        if request in self._order:
            _insert(self._group(request).requests, request)

    def adapters(self) -> set[Adapter]:
        """Return the adapters of all candidates for admission."""
        return {adapter for groups in self.tenants.values() for adapter in groups if adapter is not None}

    def _group(self, request: Request) -> Group:
        groups = self.tenants.get(request.tenant)
        if groups is None:
            groups = self.tenants[request.tenant] = {}
        group = groups.get(request.adapter)
        if group is None:
            group = groups[request.adapter] = Group(request.adapter)
        return group

    def _leave_group(self, request: Request) -> None:
        groups = self.tenants.get(request.tenant)
        group = None if groups is None else groups.get(request.adapter)
        if groups is None or group is None or request not in group.requests:
            return
        del group.requests[request]
        if not group.requests:
            del groups[request.adapter]
            if not groups:
                del self.tenants[request.tenant]


def _insert(requests: OrderedDict[Request, None], request: Request) -> None:
    """Put a request before the first of a later place; few are expected to be before it."""
    before = list(takewhile(lambda other: other.place < request.place, requests))
    requests[request] = None
    for earlier in (request, *reversed(before)):
        requests.move_to_end(earlier, last=False)
