"""Shadow weights on the memory of contents."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from chorus.core.requests.types import CannotMerge
from chorus.memory.adapters.adapter import Adapter
from chorus.memory.pages.pool import PageKind, PagePool

from .asked import Violation, promise
from .made_up_model import Memory, content_of
from .virtual_reads import VirtualClock


class CheckedShadow:
    """Shadow weights of as many matrices as an adapter has pages, at most three; a call makes one. Some adapters weigh
    too much.
    """

    def __init__(self, memory: Memory, clock: VirtualClock) -> None:
        self.adapter: Adapter | None = None
        self.runs: list[range] = []
        self.last: list[range] = []
        self.made = 0
        self._memory = memory
        self._clock = clock

    def sizes(self, adapter: Adapter) -> list[int]:
        return [1, 2, 3][: adapter.num_pages]

    def wished_runs(self, adapter: Adapter) -> list[range] | None:
        """The last ones, as of steps that were captured with them."""
        return self.last if [len(run) for run in self.last] == self.sizes(adapter) else None

    def begin(self, adapter: Adapter, runs: list[range]) -> None:
        promise(bool(adapter.pages) and adapter.transfer is None, f"{adapter} is merged before it is there")
        promise([len(run) for run in runs] == self.sizes(adapter), "the shadow has too many pages, or too few")
        self.adapter, self.runs, self.last, self.made = adapter, runs, runs, 0

    def advance(self, max_seconds: float) -> bool:
        self._clock.advance(0.0003)
        adapter = self.adapter
        if adapter is None or not adapter.pages:
            raise Violation(f"{adapter} was evicted while it is merged")
        if self.outweighs(adapter):
            raise CannotMerge("it outweighs the weights")
        for page in self.runs[self.made]:
            self._memory[page][0] = ("shadow", content_of(adapter))
        self.made += 1
        return self.made == len(self.runs)

    @property
    def share_made(self) -> float:
        return self.made / len(self.runs) if self.runs else 0.0

    def drop(self) -> None:
        self.adapter, self.runs, self.made = None, [], 0

    def outweighs(self, adapter: Adapter) -> bool:
        """True if an adapter can't be merged: it weighs too much."""
        return content_of(adapter) % 7 == 0

    def check_taken(self, taken: Iterable[range]) -> None:
        """Check the pages that the arena has given: of some runs, and of all of them before anything is merged."""
        pages = set(itertools.chain.from_iterable(taken))
        promise(pages.issubset(itertools.chain.from_iterable(self.runs)), "a shadow was given other pages than its own")
        promise(not self.made or len(pages) == sum(map(len, self.runs)), "a shadow is made in pages that it lacks")

    def check(self, merged: Adapter, pool: PagePool) -> list[int]:
        """Return the shadow's pages; raises Violation unless the whole of an adapter's shadow is in the arena."""
        promise(merged is self.adapter and self.made == len(self.runs), "a step with a shadow that is not whole")
        want = ("shadow", content_of(merged))
        pages = list(itertools.chain.from_iterable(self.runs))
        for page in pages:
            if pool.kind(page) is not PageKind.SHADOW or self._memory[page][0] != want:
                raise Violation(f"page {page} of the shadow of {merged} is of another kind, or was overwritten")
        return pages
