"""The eviction order of what is in the page pool, and of what is in host memory.

GreedyDual-Size-Frequency: an item's priority is `clock + uses · cost / pages`, where the cost is the time to bring it
back. The item with the lowest priority is evicted first, and the clock rises to that priority. Thus expensive, popular
and small items stay, and formerly popular items age. There is no fixed split between kinds: they compete on the seconds
saved per page.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple


@dataclass(slots=True)
class RestoreCosts:
    """Seconds to bring back a page of each kind; the engine updates them with measurements."""

    prefix_page: float = 1e-2
    host_adapter_page: float = 1e-4
    disk_adapter_page: float = 1e-3
    swapped_page: float = 2e-4
    """Out to host memory and back."""
    host_prefix_page: float = 1e-4
    """From host memory."""
    disk_prefix_page: float = 5e-4
    """From a file to host memory."""

    def observe(self, name: str, seconds_per_page: float) -> None:
        """Move a cost a fifth of the way to a new measurement."""
        setattr(self, name, getattr(self, name) + 0.2 * (seconds_per_page - getattr(self, name)))

    def doubt(self, name: str) -> None:
        """Move a cost a fifth of the way back to its first value: it was too high for anything to measure it."""
        self.observe(name, getattr(RestoreCosts(), name))


class Freed(NamedTuple):
    """An item that becomes evictable."""

    item: Hashable
    seconds: float
    """That are lost per page, times its uses."""
    depth: int


class EvictionOrder:
    """Items that may be evicted now, by priority."""

    def __init__(self, *, lru: bool = False) -> None:
        """lru: evict the item that became evictable first, and ignore everything else; a baseline."""
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

        cost: seconds to bring it back. wanted: a waiting request will use it, so everything else is evicted first.
        depth: among equals, the deepest is evicted first. in_use: evictable only as a last resort, just before the
        items that waiting requests want.
        """
        serial = self._serials[item] = next(self._serial)
        if in_use:
            entry = (True, -math.inf, 0, serial, item)
        else:
            seconds = uses * cost / max(1, pages)
            entry = self._entry(item, seconds, serial, self._clock, depth=depth, wanted=wanted)
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 64 + 4 * len(self._serials):
            self._heap = [entry for entry in self._heap if self._is_valid(entry)]
            heapq.heapify(self._heap)

    def discard(self, item: Hashable) -> None:
        """Make an item no longer evictable: it is in use again, or gone. Does nothing if it was not evictable."""
        self._serials.pop(item, None)

    def pop(self, accepts: Callable[[Any], bool] | None = None) -> Hashable:
        """Remove and return the item to evict next. Raises IndexError if there is none.

        accepts: returns False for an item that can't be evicted now; it keeps its position.
        """
        kept: list[tuple[bool, float, int, int, Hashable]] = []
        try:
            while True:
                entry = heapq.heappop(self._heap)
                wanted, priority, _, _, item = entry
                if not self._is_valid(entry):
                    continue
                if accepts is not None and not accepts(item):
                    kept.append(entry)
                    continue
                if not wanted:
                    self._clock = max(self._clock, priority)
                del self._serials[item]
                return item
        finally:
            for entry in kept:
                heapq.heappush(self._heap, entry)

    def upcoming(self, freed_by: Callable[[Any], Freed | None] = lambda item: None) -> Iterator[Hashable]:
        """The items in the order in which they would be evicted now. The order must not change meanwhile.

        freed_by: returns what becomes evictable when an item has been evicted; None if nothing does.
        """
        heap, clock, serials = self._heap, self._clock, itertools.count(next(self._serial))
        found = [(heap[0], 0)] if heap else []  # entries that all others follow, with their places in the heap, or -1
        while found:
            entry, at = heapq.heappop(found)
            if at >= 0:
                for child in range(2 * at + 1, min(2 * at + 3, len(heap))):
                    heapq.heappush(found, (heap[child], child))
                if not self._is_valid(entry):
                    continue
            wanted, priority, _, _, item = entry
            clock = clock if wanted else max(clock, priority)
            yield item
            if (freed := freed_by(item)) is not None:
                entry = self._entry(freed.item, freed.seconds, next(serials), clock, depth=freed.depth)
                heapq.heappush(found, (entry, -1))

    def _entry(
        self, item: Hashable, seconds: float, serial: int, clock: float, *, depth: int, wanted: bool = False
    ) -> tuple[bool, float, int, int, Hashable]:
        """An item's place in the order. seconds: that are lost per page, times its uses."""
        if self._lru:
            return False, float(serial), 0, serial, item
        return wanted, clock + seconds, -depth, serial, item

    def _is_valid(self, entry: tuple[bool, float, int, int, Hashable]) -> bool:
        return self._serials.get(entry[4]) == entry[3]
