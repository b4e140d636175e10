"""Pages of shadow weights: a second copy of some weights, with an adapter in it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from .eviction import EvictionOrder
from .pool import PageKind, PagePool


class ShadowPages:
    """Runs of consecutive pages, one per matrix, which are given up all at once.

    They compete for the memory with idle adapters and cached prefixes while steps don't use what is in them, and go
    after these while steps do.
    """

    def __init__(self, pool: PagePool, order: EvictionOrder) -> None:
        self._pool = pool
        self._order = order
        self.pages: list[int] = []
        self.in_use = False
        self.on_gone: Callable[[], None] = lambda: None
        """Called when the pages have been given up."""

    def take(self, runs: Sequence[range]) -> None:
        """Take free pages, in use until `rest`. OutOfPages, and nothing taken, when one is not free."""
        pages = list(itertools.chain.from_iterable(runs))
        self._pool.take(pages, PageKind.SHADOW)
        self.pages = pages
        self.use()

    def use(self) -> None:
        """Steps use what is in the pages, or it is being made."""
        self.in_use = True
        self._order.add(self, len(self.pages), 0.0, 0, in_use=True)

    def rest(self, cost: float, uses: int) -> None:
        """Steps no longer use it. cost: seconds to make it again; uses: times that it was used."""
        self.in_use = False
        self._order.add(self, len(self.pages), cost, uses)

    def give_up(self) -> None:
        """Free the pages; nothing happens when there are none."""
        if not self.pages:
            return
        self._order.discard(self)
        pages, self.pages = self.pages, []
        self.in_use = False
        self._pool.give_back(pages)
        self.on_gone()

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """The pages, for `PagePool.check_integrity`."""
        yield PageKind.SHADOW, self.pages
