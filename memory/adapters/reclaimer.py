"""Reclaiming pages by evicting unused items in one order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..pages.block import Block, KeptState, WindowPages
from ..pages.eviction import EvictionOrder
from ..pages.pool import PageKind, PagePool
from ..pages.prefix import PrefixCache
from ..pages.runs import BLOCKED, place_runs
from ..pages.shadow import ShadowPages
from .adapter import Adapter
from .store import AdapterStore

_COSTS = np.array([0 if kind in (PageKind.FREE, PageKind.SHADOW) else BLOCKED for kind in PageKind], np.uint32)
"""Cost of taking a page of each kind for merged weights; `find_runs` sets the cost of idle adapters' pages."""
_COSTS[PageKind.CACHED] = 1


@dataclass(frozen=True, slots=True)
class Reclaimer:
    """Evicts idle adapters, unused prefix blocks and merged weights in one order."""

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
        """Available pages, without the merged weights in use."""
        return self.available - (self.shadow.num_pages if self.shadow.in_use else 0)

    def make_room(self, num_pages: int) -> bool:
        """Evict until `num_pages` are free; return False, and evict nothing, if that is impossible."""
        if self.pool.num_free >= num_pages:
            return True
        if self.available < num_pages:
            return False
        while self.pool.num_free < num_pages:
            item = self.order.pop()
            if isinstance(item, Adapter):
                self.store.evict(item)
            elif isinstance(item, (Block, WindowPages, KeptState)):
                self.prefix.evict(item)
            elif item is self.shadow:
                self.shadow.give_up()
        return True

    def find_runs(self, sizes: Sequence[int], wished: Sequence[range] | None = None) -> list[range] | None:
        """Return runs of `sizes` pages that `clear` can free, or None.

        The runs are for merged weights that replace the present ones. Taking them evicts as little as possible, and
        never an item that a waiting request will use, because steps can run without merged weights. wished: preferred
        runs, taken if possible.
        """
        costs = _COSTS[self.pool.kinds()]
        costs[list(self._idle_pages())] = 1
        if wished is not None and all((costs[run.start : run.stop] < BLOCKED).all() for run in wished):
            return list(wished)
        return place_runs(sizes, costs)

    def clear(self, run: range) -> int | None:
        """Evict everything in a run of pages, and return how many pages were in use. Return None, and evict nothing, if
        a page is now in use by a request or wanted by one.
        """
        kinds = self.pool.kinds()[run.start : run.stop]
        pages = (kinds.nonzero()[0] + run.start).tolist()  # the pages that are not free
        idle = self._idle_pages() if (kinds == PageKind.ADAPTER).any() else {}
        if any(page not in idle and self.pool.kind(page) is not PageKind.CACHED for page in pages):
            return None
        for page in pages:
            kind = self.pool.kind(page)
            if kind is PageKind.ADAPTER:
                self.store.evict(idle[page])
            elif kind is PageKind.CACHED:
                self.prefix.evict_page(page)
        return len(pages)

    def _idle_pages(self) -> dict[int, Adapter]:
        """Return the pages of adapters that no request uses or waits for."""
        return {page: adapter for adapter in self.store.idle() if not adapter.requests for page in adapter.pages}

    def reclaim_all(self) -> int:
        """Evict everything that no request uses; return the number of pages freed."""
        free = self.pool.num_free
        self.make_room(self.available)
        return self.pool.num_free - free
