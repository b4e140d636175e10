"""Reclaiming of pages: what nobody uses makes room, in one order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..pages.eviction import EvictionOrder
from ..pages.pool import PageKind, PagePool
from ..pages.prefix import Block, PrefixCache
from ..pages.runs import BLOCKED, place_runs
from ..pages.shadow import ShadowPages
from .adapter import Adapter
from .store import AdapterStore

_COSTS = np.array([0 if kind in (PageKind.FREE, PageKind.SHADOW) else BLOCKED for kind in PageKind], np.uint32)
"""Of taking a page of each kind for shadow weights; what idle adapters hold is told by its owner."""
_COSTS[PageKind.CACHED] = 1


@dataclass(frozen=True, slots=True)
class Reclaimer:
    """Evicts idle adapters, unused prefix blocks and shadow weights by one order."""

    pool: PagePool
    order: EvictionOrder
    store: AdapterStore
    prefix: PrefixCache
    shadow: ShadowPages

    @property
    def available(self) -> int:
        """Pages that are free or that `make_room` can free."""
        return self.pool.num_unused + self.store.num_idle_pages + self.shadow.num_pages

    @property
    def spare(self) -> int:
        """Those of them that nothing is made with."""
        return self.available - (self.shadow.num_pages if self.shadow.in_use else 0)

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free. False, and nothing evicted, if that can't be had."""
        if self.pool.num_free >= num_pages:
            return True
        if self.available < num_pages:
            return False
        while self.pool.num_free < num_pages:
            item = self.order.pop()
            if isinstance(item, Adapter):
                self.store.evict(item)
            elif isinstance(item, Block):
                self.prefix.evict(item)
            elif item is self.shadow:
                self.shadow.give_up()
        return True

    def make_runs(self, sizes: Sequence[int], wished: Sequence[range] | None = None) -> list[range] | None:
        """Evict until there are runs of so many free pages each; None, and nothing evicted, if that can't be had.

        They are for shadow weights, in place of those that there are. Where the least has to go, but never what a
        waiting request will use: steps can do without a shadow. wished: the very runs to take if they can be had.
        """
        pool, prefix = self.pool, self.prefix
        idle = [adapter for adapter in self.store.idle() if not adapter.requests]
        held = np.fromiter(itertools.chain.from_iterable(adapter.pages for adapter in idle), np.intp)
        costs = _COSTS[pool.kinds()]
        costs[held] = 1
        if wished is not None and all((costs[run.start : run.stop] < BLOCKED).all() for run in wished):
            runs = list(wished)
        elif (runs := place_runs(sizes, costs)) is None:
            return None
        self.shadow.give_up()
        owners = np.zeros(len(costs), np.int32)  # places in `idle`
        owners[held] = np.repeat(np.arange(len(idle)), [len(adapter.pages) for adapter in idle])
        pages = np.concatenate([np.arange(run.start, run.stop) for run in (range(0), *runs)])
        for page in pages[costs[pages] > 0].tolist():
            kind = pool.kind(page)
            if kind is PageKind.ADAPTER:
                self.store.evict(idle[owners[page]])
            elif kind is PageKind.CACHED:
                prefix.evict_from(prefix.by_page[page])
        return runs

    def reclaim_all(self) -> int:
        """Evict everything that no request uses; returns the pages freed."""
        free = self.pool.num_free
        self.make_room(self.available)
        return self.pool.num_free - free
