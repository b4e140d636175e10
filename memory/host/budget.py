"""One host memory budget, with one eviction order, for adapters' images, swapped KV, images of cached pages and rows of
encoded images.

Tests: tests/memory/host/test_host_budget.py
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from ..pages.eviction import EvictionOrder


class Lodger(Protocol):
    """A user of host memory, some of whose items may be dropped."""

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        ...

    def is_loose(self, item: Hashable) -> bool:
        """True if an offered item may be dropped now."""
        ...

    def drop(self, item: Hashable) -> None:
        """Drop an item, which frees its bytes."""
        ...


@dataclass(slots=True)
class _Offer:
    """An item that may be dropped while it is loose."""

    lodger: Lodger
    num_bytes: int
    wanted: bool


class HostBudget:
    """Bytes of host memory shared by several lodgers, whose items are dropped in one order: see `EvictionOrder`."""

    def __init__(self, capacity_bytes: int, *, lru: bool = False) -> None:
        self.capacity_bytes = capacity_bytes
        self._order = EvictionOrder(lru=lru)
        self._offers: dict[Hashable, _Offer] = {}
        self._lodgers: dict[Lodger, Callable[[], int]] = {}
        self._keeps: list[Callable[[], int]] = []

    def join(
        self, lodger: Lodger, behind: Callable[[], int] = lambda: 0, keeps: Callable[[], int] | None = None
    ) -> None:
        """Count a lodger's bytes. behind: returns those of items that it offers once others have been dropped. keeps:
        returns those of other lodgers' items that it may keep in use once they have been dropped.
        """
        self._lodgers[lodger] = behind
        if keeps is not None:
            self._keeps.append(keeps)

    @property
    def num_bytes(self) -> int:
        """Bytes in use."""
        return sum(lodger.num_bytes for lodger in self._lodgers)

    def free_bytes(self) -> int:
        """Bytes that are not in use."""
        return self.capacity_bytes - self.num_bytes

    def excess(self, num_bytes: int) -> int:
        """Bytes to free before `num_bytes` more fit; zero or less if they fit."""
        return self.num_bytes + num_bytes - self.capacity_bytes

    def offer(
        self,
        lodger: Lodger,
        item: Hashable,
        num_bytes: int,
        cost: float,
        uses: int,
        *,
        wanted: bool = False,
        depth: int = 0,
    ) -> None:
        """Let an item be dropped, or change its priority.

        cost: seconds to bring it back. wanted: a waiting request needs it, so it is dropped last, and only for another
        waiting request's adapter. depth: among equals, the deepest is dropped first.
        """
        self._offers[item] = _Offer(lodger, num_bytes, wanted)
        self._order.add(item, max(1, num_bytes), cost, uses, depth=depth)

    def withdraw(self, item: Hashable) -> None:
        """Keep an item from being dropped: it is in use, or gone. Does nothing if it was not offered."""
        if self._offers.pop(item, None) is not None:
            self._order.discard(item)

    def can_spare(self, num_bytes: int) -> bool:
        """True if at least `num_bytes` may be dropped, one item after another, that no waiting request needs."""
        if num_bytes <= 0:
            return True
        num_bytes += self._kept_bytes()
        for item, offer in self._offers.items():
            if num_bytes <= 0:
                break
            if self._is_spare(item):
                num_bytes -= offer.num_bytes
        return num_bytes <= 0 or num_bytes <= sum(behind() for behind in self._lodgers.values())

    def offered_bytes(self, lodger: Lodger) -> int:
        """Bytes of a lodger's items that are offered, and that no waiting request needs."""
        return sum(offer.num_bytes for offer in self._offers.values() if offer.lodger is lodger and not offer.wanted)

    def room(self) -> int:
        """The most bytes for which `has_room` is true."""
        spare = sum(offer.num_bytes for item, offer in self._offers.items() if self._is_spare(item))
        spare += sum(behind() for behind in self._lodgers.values()) - self._kept_bytes()
        return self.free_bytes() + max(0, spare)

    def _kept_bytes(self) -> int:
        return sum(keeps() for keeps in self._keeps)

    def has_room(self, num_bytes: int) -> bool:
        """True if `num_bytes` more fit once everything is dropped that no waiting request needs."""
        return self.can_spare(self.excess(num_bytes))

    def make_room(self, num_bytes: int) -> None:
        """Drop items until `num_bytes` more fit, as far as items may be dropped; those that requests wait for last."""
        while self.excess(num_bytes) > 0:
            if self._drop_next(wanted=False) is None and self._drop_next(wanted=True) is None:
                return

    def claim(self, num_bytes: int) -> bool:
        """Make room without dropping what a waiting request needs; return False, and drop nothing, if that is not
        enough.
        """
        if not self.has_room(num_bytes):
            return False
        while self.excess(num_bytes) > 0:
            if self._drop_next(wanted=False) is None:
                return False
        return True

    def admit(self, lodger: Lodger, item: Hashable, num_bytes: int, cost: float, uses: int, *, depth: int = 0) -> bool:
        """Make room for `num_bytes` of a new item by dropping items that come before it in the order; return False if
        that is not enough. The item is offered then only if it already was.
        """
        if num_bytes > self.capacity_bytes:
            return False
        if self.excess(num_bytes) <= 0:
            return True
        before = self._offers.get(item)
        self.offer(lodger, item, num_bytes, cost, uses, depth=depth)
        while self.excess(num_bytes) > 0:
            dropped = self._next(wanted=False)
            if dropped is None or dropped == item:
                break
            self._drop(dropped)
        fits = self.excess(num_bytes) <= 0
        self.withdraw(item)
        if before is not None:
            self.offer(lodger, item, before.num_bytes, cost, uses, wanted=before.wanted, depth=depth)
        return fits

    def _is_spare(self, item: Hashable) -> bool:
        offer = self._offers[item]
        return not offer.wanted and offer.lodger.is_loose(item)

    def _is_last_resort(self, item: Hashable) -> bool:
        offer = self._offers[item]
        return offer.wanted and offer.lodger.is_loose(item)

    def _next(self, *, wanted: bool) -> Hashable | None:
        """Take the next item out of the order; None if none may be dropped."""
        try:
            return self._order.pop(self._is_last_resort if wanted else self._is_spare)
        except IndexError:
            return None

    def _drop_next(self, *, wanted: bool) -> Hashable | None:
        if (item := self._next(wanted=wanted)) is not None:
            self._drop(item)
        return item

    def _drop(self, item: Hashable) -> None:
        self._offers.pop(item).lodger.drop(item)
