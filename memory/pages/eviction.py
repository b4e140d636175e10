"""The one order in which idle adapters and cached prefix blocks give up their pages.

GreedyDual-Size-Frequency: an item's priority is `clock + uses · cost / pages`, cost being the time to bring it back;
the lowest goes first and the clock rises to its priority. So what is dear, often used and small stays, and what was
once popular ages. There is no fixed split between the two kinds: they compete on seconds saved per page.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(slots=True)
class RestoreCosts:
    """Seconds to bring back a page of each kind; the engine keeps them at what it measures."""

    prefix_page: float = 1e-2
    host_adapter_page: float = 1e-4
    disk_adapter_page: float = 1e-3
    swapped_page: float = 2e-4  # out to host memory and back

    def observe(self, name: str, seconds_per_page: float) -> None:
        """Move a cost a fifth of the way to a new measurement."""
        setattr(self, name, getattr(self, name) + 0.2 * (seconds_per_page - getattr(self, name)))


class EvictionOrder:
    """Evictable items by priority. Only what may be evicted right now is in here."""

    def __init__(self, *, lru: bool = False) -> None:
        """lru: what became evictable first goes first, and nothing else counts: the pool to compare with."""
        self._lru = lru
        self._heap: list[tuple[bool, float, int, int, Hashable]] = []
        self._serials: dict[Hashable, int] = {}  # item → serial of its valid heap entry
        self._serial = itertools.count()
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._serials)

    def __contains__(self, item: Hashable) -> bool:
        return item in self._serials

    def add(
        self,
        item: Hashable,
        pages: int,
        cost: float,
        uses: int,
        *,
        wanted: bool = False,
        depth: int = 0,
        in_use: bool = False,
    ) -> None:
        """Make `item` evictable, or change its priority.

        cost: seconds to bring it back. wanted: a waiting request will use it, so everything else goes before it.
        depth: among equals the deeper goes first. in_use: evictable as a last resort, before only items wanted by
        waiting requests.
        """
        serial = self._serials[item] = next(self._serial)
        if in_use:
            entry = (True, -math.inf, 0, serial, item)
        elif self._lru:
            entry = (False, float(serial), 0, serial, item)
        else:
            entry = (wanted, self._clock + uses * cost / max(1, pages), -depth, serial, item)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * len(self._serials):
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def discard(self, item: Hashable) -> None:
        """The item is in use again, or gone. Nothing happens when it was not evictable."""
        self._serials.pop(item, None)

    def pop(self) -> Hashable:
        """Take out the item to evict next. IndexError when there is none."""
        while True:
            entry = heapq.heappop(self._heap)
            if self._is_valid(entry):
                wanted, priority, _, _, item = entry
                if not wanted:
                    self._clock = max(self._clock, priority)
                del self._serials[item]
                return item

    def _is_valid(self, entry: tuple[bool, float, int, int, Hashable]) -> bool:
        return self._serials.get(entry[4]) == entry[3]
