"""Pages of merged weights (the shadow): a copy of some weight matrices with an adapter added."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .eviction import EvictionOrder
from .pool import PageKind, PagePool


class ShadowPages:
    """Runs of consecutive pages, one per matrix, which are freed all at once.

    While steps don't use the merged weights, their pages compete with idle adapters and cached prefixes. While steps
    use them, all of those are evicted first.
    """

    def __init__(self, pool: PagePool, order: EvictionOrder) -> None:
        self._pool = pool
        self._order = order
        self.runs: list[range] = []
        self.num_pages = 0
        self.in_use = False
        self.on_gone: Callable[[], None] = lambda: None
        """Called after `give_up` has freed the pages."""

    def take(self, runs: Sequence[range]) -> None:
        """Take more free pages, in use until `rest`. Raises OutOfPages, and takes none, if one is not free."""
        self._pool.take(runs, PageKind.SHADOW)
        self.runs += runs
        self.num_pages += sum(map(len, runs))
        self.use()

    def use(self) -> None:
        """Mark the pages as in use: steps use the merged weights, or they are being made."""
        self.in_use = True
        self._order.add(self, self.num_pages, 0.0, 0, in_use=True)

    def rest(self, cost: float, uses: int) -> None:
        """Mark the pages as unused. cost: seconds to make the weights again; uses: how often they were used."""
        self.in_use = False
        self._order.add(self, self.num_pages, cost, uses)

    def give_up(self) -> None:
        """Free the pages, and report it. The merged weights of some adapters have none."""
        self._order.discard(self)
        runs, self.runs, self.num_pages = self.runs, [], 0
        self.in_use = False
        if runs:
            self._pool.give_back(runs, PageKind.SHADOW)
        self.on_gone()

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """The pages, for `PagePool.check_integrity`."""
        yield PageKind.SHADOW, [page for run in self.runs for page in run]
