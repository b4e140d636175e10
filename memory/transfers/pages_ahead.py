"""Copies of cached pages to host memory before they leave the page pool, where a copy takes time: on a GPU.

An eviction must not wait for a copy, because the page has a new owner in the same step. So what would be evicted next
is copied while it is cached and nobody writes to it. An eviction finds the images, or does without.

What is copied: blocks and checkpoints that no request uses, in the order of their eviction, up to `horizon` pages with
those that are free. So nothing is copied while the pool has room, and then about one page for each that leaves.
To copy every block when its request ends would cost as much traffic on a server whose pool never fills; to wait until a
block is used a second time would lose prompts that come back after they have left, for which this tier is.

Tests: tests/memory/transfers/test_pages_ahead.py, tests/core/test_prefix_tiers_ahead.py, tests/simulation
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from ..host.fault_log import FaultLog
from ..pages.block import Block, Cached, KeptState, WindowPages
from ..pages.eviction import Freed
from ..pages.pool import PageKind, PagePool
from .page_copies import PageSave
from .transfer import ExecutorLost, state_of

if TYPE_CHECKING:
    from ..host.budget import HostBudget
    from ..pages.eviction import EvictionOrder, RestoreCosts
    from .swap_backend import SwapBackend

logger = logging.getLogger(__name__)

MOST_BYTES = 32 << 20
"""Bytes in flight at most: a request that is swapped out waits for no more on the same stream. Chosen."""

MOST_PAGES = 16
"""Pages in flight at most, and so pages that a step begins to copy: each takes the host some time. Chosen."""

BYTES_PER_SECOND = 1 << 30
"""Bytes of copies that are begun in a second at most: a small part of what a GPU's link carries. Chosen."""


_COPIES = "copies of cached pages to host memory"


class Images(Protocol):
    """The host tier, which keeps images of what was copied."""

    costs: RestoreCosts

    def admit(self, item: Cached, count: int, block: Block) -> bool:
        """Make room for so many images; False if what would leave for them is worth more."""
        ...

    def put(self, item: Block | KeptState, groups: Sequence[int], images: Sequence[Any]) -> None:
        """Keep images of a block's pages in some groups, or of a checkpoint's."""
        ...

    def offer(self, block: Block) -> None:
        """Update whether a block's images may be dropped, and when."""
        ...


@dataclass(eq=False)
class _Copy:
    """A copy in flight of a block's pages in some groups, or of a checkpoint's."""

    item: Block | KeptState
    groups: list[int]
    transfer: PageSave
    is_void: bool = False
    """True if a page had a new owner before the copy ended: it may have copied anything."""


@dataclass(eq=False)
class PagesAhead:
    """Copies that are in flight, and what is copied next. Nothing waits for it; the engine's thread calls it."""

    host: Images
    pool: PagePool
    order: EvictionOrder
    """Of eviction from the pool."""
    backend: SwapBackend
    budget: HostBudget
    page_bytes: int
    horizon: int
    """What may leave soon: so many pages, free ones among them."""
    clock: Callable[[], float]
    pages_of: Callable[[Hashable], int]
    """Returns the pages of an item of the order that is not the prefix cache's."""

    num_begun_pages: int = 0
    """Pages that were begun to be copied, in vain or not."""
    num_void_pages: int = 0
    """Those that left too early, or could not be copied."""

    def __post_init__(self) -> None:
        self._most_pages = max(1, min(MOST_PAGES, MOST_BYTES // self.page_bytes))
        self._faults = FaultLog(logger)
        self._copies: list[_Copy] = []
        self._by_page: dict[int, _Copy] = {}  # of copies that are not void
        self._wanted: deque[Block | KeptState] = deque()
        self._must_look = True  # once there are fewer free pages
        self._num_left = self._last_left = 0  # pages that have left, and at the last look
        self._last_cached = -1  # cached pages at the last look, if all of them leave within the horizon
        self._allowed, self._allowed_at = float(MOST_BYTES), self.clock()
        self.budget.join(self)

    # -- for the host tier

    def page_left(self, page: int) -> None:
        """Note that a page is about to have another owner."""
        self._num_left += 1
        if (copy := self._by_page.get(page)) is not None:
            self._void(copy)

    def void_all(self) -> None:
        """Keep nothing of what is in flight."""
        for copy in self._copies:
            self._void(copy)

    def may_leave(self, pages: Iterable[int]) -> bool:
        """True if no request uses one of a block's pages, or of a checkpoint's."""
        return any(self._is_unused(page) for page in pages)

    # -- for the budget

    @property
    def num_bytes(self) -> int:
        """Host memory of copies in flight."""
        return self._num_in_flight * self.page_bytes

    def is_loose(self, item: Hashable) -> bool:
        """False: nothing is offered."""
        return False

    def drop(self, item: Hashable) -> None:
        """Nothing is offered."""

    # -- between steps

    def advance(self) -> None:
        """Take in what was copied, and begin further copies. It never waits. Raises ExecutorLost."""
        for copy in list(self._copies):
            self._finish(copy)
        if self.pool.num_free >= self.horizon:
            self._wanted.clear()
            self._must_look = True
            return
        now = self.clock()
        self._allowed += (now - self._allowed_at) * BYTES_PER_SECOND
        self._allowed, self._allowed_at = min(self._allowed, float(MOST_BYTES)), now
        if not self._wanted and self._has_changed():
            self._look()
        while self._wanted and self._num_in_flight < self._most_pages and self._allowed > 0:
            self._begin(self._wanted.popleft())

    @property
    def _num_in_flight(self) -> int:
        return sum(len(copy.transfer.pages) for copy in self._copies)

    def _has_changed(self) -> bool:
        """True if something else may leave next than at the last look, which takes a while."""
        if self._last_cached >= 0 and self._last_cached != self.pool.count(PageKind.CACHED):
            return True
        return self._must_look or 4 * (self._num_left - self._last_left) >= self.horizon

    def _look(self) -> None:
        """Choose what is copied next."""
        self._must_look, self._last_left = False, self._num_left
        room, leaving, taken = self.horizon - self.pool.num_free, set[int](), Counter[Block]()
        for item in self.order.upcoming(partial(self._freed_by, taken)):
            if len(leaving) >= room:
                break
            if isinstance(item, Block):
                self._want(item, leaving)
                if item.checkpoint is not None:
                    self._want_state(item.checkpoint, leaving)
            elif isinstance(item, WindowPages):
                if not self._is_leaf(item.block, taken):  # else all of its pages leave together
                    self._want(item.block, leaving)
            elif isinstance(item, KeptState):
                self._want_state(item, leaving)
            else:
                room -= self.pages_of(item)
        self._last_cached = self.pool.count(PageKind.CACHED) if len(leaving) < room else -1

    def _freed_by(self, taken: Counter[Block], item: Hashable) -> Freed | None:
        """What becomes evictable after an item: its parent if no other block after that is in the pool. taken: counts
        blocks that have left, by parent.
        """
        parent = item.parent if isinstance(item, Block) else None
        if parent is None:
            return None
        taken[parent] += 1
        if not self._is_leaf(parent, taken):
            return None
        return Freed(parent, parent.uses * self.host.costs.prefix_page, parent.depth)

    def _want(self, block: Block, leaving: set[int]) -> None:
        """Want images of a block's unused pages, which are among those that are `leaving`."""
        unused = [group for group, page in enumerate(block.pages) if self._is_unused(page)]
        leaving.update(block.pages[group] for group in unused)
        if any(group not in block.images for group in unused):
            self._wanted.append(block)
        elif unused:
            self.host.offer(block)  # its images are worth more now: there is no time to copy it again

    def _want_state(self, state: KeptState, leaving: set[int]) -> None:
        if not state.pages or not self._is_unused(state.pages[0]):
            return
        leaving.update(state.pages)
        if state.images:
            self.host.offer(state.block)
        else:
            self._wanted.append(state)

    def _begin(self, item: Block | KeptState) -> None:
        """Begin to copy what is missing of an item, unless it is in use again, or has left."""
        groups, pages = list[int](), list[int]()
        if isinstance(item, Block):
            block = item
            groups = [at for at, page in enumerate(item.pages) if at not in item.images and self._may_begin(page)]
            pages = [item.pages[at] for at in groups]
        elif not item.images and all(map(self._may_begin, item.pages)):
            block, pages = item.block, list(item.pages)
        else:
            return
        if not pages or not self.host.admit(item, len(pages), block):
            return
        try:
            transfer = PageSave(self.backend, pages, self._most_pages)
        except ExecutorLost:
            raise
        except Exception as error:
            about = f"cached pages could not be copied to host memory: {type(error).__name__}: {error}"
            self._faults.failed(_COPIES, type(error).__name__, about)
            self._wanted.clear()  # the next look tries again
            return
        self._faults.worked(_COPIES)
        copy = _Copy(item, groups, transfer)
        self._copies.append(copy)
        self._by_page.update(dict.fromkeys(pages, copy))
        self._allowed -= len(pages) * self.page_bytes
        self.num_begun_pages += len(pages)

    def _may_begin(self, page: int) -> bool:
        return self._is_unused(page) and page not in self._by_page

    def _is_leaf(self, block: Block, taken: Counter[Block]) -> bool:
        """True if a block is evictable once so many blocks after it have left. The root of a trie never is."""
        held = [page for page in block.pages if page]
        return bool(held) and taken[block] >= len(block.resident) and all(map(self._is_unused, held))

    def _is_unused(self, page: int) -> bool:
        return page != PagePool.DUMMY and self.pool.kind(page) is PageKind.CACHED

    def _finish(self, copy: _Copy) -> None:
        """Take in a copy that has ended, or forget it if it is void or has failed, once it is quiet."""
        state = "failed" if copy.is_void else state_of(copy.transfer)
        if state == "coming":
            return
        if state == "failed":
            self._void(copy)
            if copy.transfer.is_quiet():
                self._copies.remove(copy)
            return
        self._copies.remove(copy)
        self._forget_pages(copy)
        self.host.put(copy.item, copy.groups, copy.transfer.images)

    def _void(self, copy: _Copy) -> None:
        if not copy.is_void:
            copy.is_void = True
            self.num_void_pages += len(copy.transfer.pages)
            self._forget_pages(copy)
            copy.transfer.cancel()

    def _forget_pages(self, copy: _Copy) -> None:
        for page in copy.transfer.pages:
            del self._by_page[page]
