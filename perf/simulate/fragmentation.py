"""Fragmentation of an adapter pool: contiguous first fit compared with pages."""

from __future__ import annotations

import random
from bisect import insort
from collections import OrderedDict
from typing import Any

from ...memory.pages.pool import PageKind, PagePool
from .study import Pool


class Contiguous:
    """A pool that gives an adapter one hole, the first that is large enough.

    free: bytes that no adapter holds. unusable: free bytes that can't become part of rooms for `size` bytes for want
    of their neighbours. waste: bytes of a room beyond the `size` that was asked for. num_more: rooms for `size` bytes
    that there would be if only `kept` were held. num_copies: that fill a room.
    """

    def __init__(self, pool_bytes: int) -> None:
        self.free = self._size = pool_bytes
        self._holes: list[tuple[int, int]] = [(0, pool_bytes)]  # (start, end), in order

    def take(self, size: int) -> tuple[int, int] | None:
        for index, (start, end) in enumerate(self._holes):
            if end - start >= size:
                self._holes[index : index + 1] = [(start + size, end)] if end - start > size else []
                self.free -= size
                return start, start + size
        return None

    def give_back(self, room: tuple[int, int]) -> None:
        self.free += room[1] - room[0]
        insort(self._holes, room)
        joined: list[tuple[int, int]] = []
        for start, end in self._holes:
            if joined and joined[-1][1] == start:
                joined[-1] = joined[-1][0], end
            else:
                joined.append((start, end))
        self._holes = joined

    def unusable(self, size: int) -> int:
        usable = sum((end - start) // size * size for start, end in self._holes)
        return self.free // size * size - usable

    def waste(self, room: tuple[int, int], size: int) -> int:
        return 0

    def num_more(self, kept: list[tuple[int, int]], size: int) -> int:
        edges = [0, *(edge for room in sorted(kept) for edge in room), self._size]
        return sum((end - start) // size for start, end in zip(edges[::2], edges[1::2], strict=True))

    def num_copies(self, size: int) -> int:
        return 1


class Paged:
    """The page pool that the engine uses; see `Contiguous`."""

    def __init__(self, pool_bytes: int, page_bytes: int) -> None:
        self._pool = PagePool(pool_bytes // page_bytes + 1)  # one page is the pool's own
        self._page_bytes = page_bytes

    @property
    def free(self) -> int:
        return self._pool.num_free * self._page_bytes

    def take(self, size: int) -> list[int] | None:
        count = self.num_copies(size)
        return self._pool.allocate(count, PageKind.ADAPTER) if count <= self._pool.num_free else None

    def give_back(self, room: list[int]) -> None:
        self._pool.release(room)

    def unusable(self, size: int) -> int:
        return 0

    def waste(self, room: list[int], size: int) -> int:
        return len(room) * self._page_bytes - size

    def num_more(self, kept: list[list[int]], size: int) -> int:
        return (self._pool.num_usable - sum(map(len, kept))) // self.num_copies(size)

    def num_copies(self, size: int) -> int:
        return -(-size // self._page_bytes)


def run_fragmentation(pool: Pool) -> dict[str, float]:
    """Load adapters of random size one after the other; the least recently used go until the next one fits.

    A failure is an allocation that finds enough free bytes and no room. External fragmentation is the share of the pool
    that is free and can't hold adapters of the probe's size although there are enough bytes, internal the waste in
    the held rooms relative to the adapters' sizes. The most adapters are the newest ones, which requests hold where
    they are, and as many of the probe's size as fit beside them. All are means over the cycles.
    """
    allocator: Any = Contiguous(pool.pool_bytes)
    if pool.allocator == "pages":
        allocator = Paged(pool.pool_bytes, pool.page_bytes)
    draw, use = random.Random(pool.seed), random.Random(pool.seed + 1)
    sizes, weights = zip(*pool.sizes, strict=True)
    resident: OrderedDict[int, tuple[object, int]] = OrderedDict()  # least recently used first
    failures = external = internal = most = 0.0
    for cycle in range(pool.cycles):
        size = draw.choices(sizes, weights)[0]
        used = list(resident)
        for key in use.sample(used, min(pool.in_use, len(used))):
            resident.move_to_end(key)
        failed = False
        while (room := allocator.take(size)) is None:
            failed |= allocator.free >= size
            allocator.give_back(resident.popitem(last=False)[1][0])
        failures += failed
        resident[cycle] = room, size
        held = sum(each for _, each in resident.values())
        external += allocator.unusable(pool.probe) / pool.pool_bytes
        internal += sum(allocator.waste(*each) for each in resident.values()) / held
        newest = [resident[key][0] for key in range(max(0, cycle + 1 - pool.in_use), cycle + 1) if key in resident]
        most += len(newest) + allocator.num_more(newest, pool.probe)
    return {
        "allocation_failures": failures,
        "external_fragmentation": external / pool.cycles,
        "internal_fragmentation": internal / pool.cycles,
        "most_adapters": most / pool.cycles,
        "load_seconds": pool.probe / pool.link + allocator.num_copies(pool.probe) * pool.per_copy,
    }
