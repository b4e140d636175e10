"""One step's admission: the kind of slot, the candidates for it, and the adapters that may join."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from ...memory.adapters.adapter import Adapter, Tier
from ...memory.adapters.store import AdapterStore
from ..config import EngineConfig
from ..requests.request import Request
from .output_lengths import Growth
from .queue_order import QueueOrder
from .running import Running

MOST_SHORT = 2
"""Tenants that may lack pages in a step before its admission ends. Chosen."""


class Place(Enum):
    """The slot that a request may take in a step: a free one, or the row of another tenant or call."""

    SEAT = auto()
    ACCOUNT = auto()  # from a tenant that was served more, see `SeatShares`
    CALL = auto()  # from a call with several answers, for a call with no running answer


@dataclass(eq=False, slots=True)
class StepAdmission:
    """One step's admission: the running requests, and the adapters that may join them.

    _late: adapters that must be read completely before their requests start; until `_doubt_until` all must.
    _only: adapters that may join; None: all. growth: pages that `running` is expected to grow by; None until counted.
    place, order: the kind of slot that the next request may take, and the candidates for it. held: tenants that may
    begin no more requests: one lacked pages, or pages were taken from them (they would take these back). num_short: how
    often a request lacked pages; from the first on, tenants begin nothing beyond their share of the pages.

    A step has at most `max_adapters_per_step` adapters. An overdue request that waits for a free adapter slot reserves
    it: requests behind it in the queue may neither add an adapter nor take the last slot.
    """

    _limits: EngineConfig
    _store: AdapterStore
    running: Running
    _late: set[Adapter]
    now: float
    _doubt_until: float
    _only: Collection[Adapter | None] | None = None
    growth: Growth | None = None
    num_short: int = 0
    held: set[str] = field(default_factory=set)
    place: Place = field(init=False)
    order: QueueOrder = field(init=False)
    overdue_before: float = field(init=False)
    _doubts: bool = field(init=False)
    _most_adapters: int | None = field(init=False)
    _adapters: set[Adapter] = field(default_factory=set)
    _reserved: float = math.inf  # queue position of the first request with a reserved slot

    def __post_init__(self) -> None:
        self.overdue_before = self.now - self._limits.max_overtake_seconds
        self._doubts = self.now < self._doubt_until
        self._most_adapters = self._limits.max_adapters_per_step
        if self._most_adapters is not None:
            self._adapters = {request.adapter for request in self.running if request.adapter is not None}

    def next(self) -> Request | None:
        """Return the next candidate; None if there is none, or too many have lacked pages."""
        return self.order.next() if self.num_short <= MOST_SHORT else None

    def has_row_of_call(self, place: Place, request: Request) -> bool:
        """True if a request may only take the row of a call without a running answer, and its call has one."""
        return place is self.place is Place.CALL and request.call in self.running.calls

    def pass_over_tenant(self, account: str) -> None:
        """Begin no more requests of a tenant that lacks pages."""
        self.held.add(account)
        self.num_short += 1

    @property
    def is_limited(self) -> bool:
        """True if not every adapter may join."""
        return self._most_adapters is not None or self._doubts or bool(self._late) or self._only is not None

    def may_come(self, adapter: Adapter | None, head: Request | None) -> bool:
        """True if an adapter, or the base model, may join the step.

        head: a tenant's first request that waits for it; an overdue head gets a slot reserved.
        """
        if self._only is not None and adapter not in self._only:
            return False
        if adapter is None:
            return True
        if self.is_barred(adapter):
            if head is not None and head.arrival_time < self.overdue_before and is_read(self._store, adapter):
                self.reserve(head)
            return False
        if adapter in self._late or (self._doubts and not adapter.pages):
            return is_read(self._store, adapter)
        return True

    def is_barred(self, adapter: Adapter) -> bool:
        """True if the step has no slot for an adapter."""
        most, adapters = self._most_adapters, self._adapters
        return most is not None and adapter not in adapters and len(adapters) >= most

    def reserve(self, request: Request) -> None:
        """Reserve a slot for an overdue request with a barred adapter."""
        self._reserved = min(self._reserved, request.place)

    def is_reserved(self, request: Request) -> bool:
        """True if a request would take the slot reserved for an earlier one."""
        if self._reserved >= request.place:
            return False
        return request.adapter is not None or len(self.running) >= self._limits.max_num_seqs - 1

    def add(self, request: Request) -> None:
        """Add an admitted request."""
        self.running.append(request)
        if self.growth is not None:
            self.growth.add(request)
        if request.adapter is not None:
            self._adapters.add(request.adapter)


def is_read(store: AdapterStore, adapter: Adapter) -> bool:
    """True if nothing of an adapter is still to be read from disk."""
    return store.tier(adapter) not in (Tier.DISK, Tier.LOADING)
