"""Making room: what is free, what could be, and in which order it is taken back."""

from __future__ import annotations

from ..pages.eviction import EvictionOrder
from ..pages.pool import PagePool
from ..pages.prefix import PrefixCache
from .adapter import Adapter
from .store import AdapterStore


class Reclaimer:
    """Evicts idle adapters and unused prefix blocks by one order."""

    def __init__(self, pool: PagePool, order: EvictionOrder, store: AdapterStore, prefix: PrefixCache) -> None:
        self._pool = pool
        self._order = order
        self._store = store
        self._prefix = prefix

    @property
    def available(self) -> int:
        """Pages that are free or that `make_room` can free."""
        return self._pool.num_unused + self._store.num_idle_pages

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free. False, and nothing evicted, if that can't be had."""
        if self._pool.num_free >= num_pages:
            return True
        if self.available < num_pages:
            return False
        while self._pool.num_free < num_pages:
            item = self._order.pop()
            if isinstance(item, Adapter):
                self._store.evict(item)
            else:
                self._prefix.evict(item)
        return True

    def reclaim_all(self) -> int:
        """Evict everything that nobody uses; returns the pages freed."""
        free = self._pool.num_free
        self.make_room(self.available)
        return self._pool.num_free - free
