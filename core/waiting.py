"""The waiting requests: in order of arrival, and by tenant and adapter, so that a step need not look at each."""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Iterator

from ..memory.adapter import Adapter
from .request import Request


class Group:
    """Waiting requests of one tenant for one adapter, in order."""

    __slots__ = ("adapter", "firsts", "more", "noted")

    def __init__(self, adapter: Adapter | None) -> None:
        self.adapter = adapter
        self.firsts: OrderedDict[Request, None] = OrderedDict()  # of each call the answer that came first
        self.more: OrderedDict[Request, None] = OrderedDict()
        self.noted = -math.inf  # place up to which it has been noted that they wait for their adapter

    def __len__(self) -> int:
        return len(self.firsts) + len(self.more)

    def __contains__(self, request: Request) -> bool:
        return request in self.line(request)

    def line(self, request: Request) -> OrderedDict[Request, None]:
        """Those among which a request belongs."""
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

    def newest_first(self) -> Iterator[Request]:
        """All of them, the last one first."""
        return heapq.merge(reversed(self.firsts), reversed(self.more), key=_place, reverse=True)


def _place(request: Request) -> int:
    return request.place


class WaitingQueue:
    """Every change costs the same however many wait."""

    def __init__(self) -> None:
        self._order: OrderedDict[Request, None] = OrderedDict()
        self._first = self._last = 0
        self._last_call = ""  # of the request that came last: the answers of a call come one after another
        self.tenants: dict[str, dict[Adapter | None, Group]] = {}
        #: Groups with requests of which nobody has noted yet whether they wait for their adapter.
        self.unnoted: dict[Group, None] = {}

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)

    def __contains__(self, request: Request) -> bool:
        return request in self._order

    def count(self, tenant: str) -> int:
        """Number of a tenant's requests that wait, those held back left out."""
        return sum(len(group) for group in self.tenants.get(tenant, {}).values())

    def append(self, request: Request) -> None:
        """Add one that has just come."""
        self._last += 1
        request.place = self._last
        self._order[request] = None
        request.is_further = request.call != "" and request.call == self._last_call
        self._last_call = request.call
        self._group(request).line(request)[request] = None

    def append_first(self, request: Request) -> None:
        """Add one that has run and is to go on before all others."""
        self._first -= 1
        request.place = self._first
        self._order[request] = None
        self._order.move_to_end(request, last=False)
        self.release(request)

    def remove(self, request: Request) -> None:
        del self._order[request]
        self._leave_group(request)

    def hold_back(self, request: Request) -> None:
        """Keep a request waiting without its being considered, until it is released."""
        self._leave_group(request)

    def release(self, request: Request) -> None:
        """Consider a request that was held back, before others of its group. Nothing happens if it has left."""
        if request in self._order:
            line = self._group(request).line(request)
            line[request] = None
            line.move_to_end(request, last=False)

    def has_firsts(self) -> bool:
        """True if a request may be considered that came as the first of its call."""
        return any(group.firsts for groups in self.tenants.values() for group in groups.values())

    def adapters(self) -> set[Adapter]:
        """Adapters of the requests that may be considered."""
        return {adapter for groups in self.tenants.values() for adapter in groups if adapter is not None}

    def _group(self, request: Request) -> Group:
        groups = self.tenants.get(request.tenant)
        if groups is None:
            groups = self.tenants[request.tenant] = {}
        group = groups.get(request.adapter)
        if group is None:
            group = groups[request.adapter] = Group(request.adapter)
        if request.adapter is not None:
            self.unnoted[group] = None
        return group

    def _leave_group(self, request: Request) -> None:
        groups = self.tenants.get(request.tenant)
        group = None if groups is None else groups.get(request.adapter)
        if groups is None or group is None or request not in group:
            return
        del group.line(request)[request]
        if not group:
            del groups[request.adapter]
            self.unnoted.pop(group, None)
            if not groups:
                del self.tenants[request.tenant]
