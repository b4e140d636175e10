"""Pages of shadow weights: a second copy of some weights, with an adapter in it."""

from __future__ import annotations

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
        self.runs: list[range] = []
        self.num_pages = 0
        self.in_use = False
        self.on_gone: Callable[[], None] = lambda: None
        """Called when the pages have been given up."""

    def take(self, runs: Sequence[range]) -> None:
        """Take more free pages, in use until `rest`. OutOfPages, and nothing taken, when one is not free."""
        self._pool.take(runs, PageKind.SHADOW)
        self.runs += runs
        self.num_pages += sum(map(len, runs))
        self.use()

    def use(self) -> None:
        """Steps use what is in the pages, or it is being made."""
        self.in_use = True
        self._order.add(self, self.num_pages, 0.0, 0, in_use=True)

    def rest(self, cost: float, uses: int) -> None:
        """Steps no longer use it. cost: seconds to make it again; uses: times that it was used."""
        self.in_use = False
        self._order.add(self, self.num_pages, cost, uses)

    def give_up(self) -> None:
        """Free the pages; nothing happens when there are none."""
        if not self.num_pages:
            return
        self._order.discard(self)
        runs, self.runs, self.num_pages = self.runs, [], 0
        self.in_use = False
        self._pool.give_back(runs, PageKind.SHADOW)
        self.on_gone()

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """The pages, for `PagePool.check_integrity`."""
        yield PageKind.SHADOW, [page for run in self.runs for page in run]
