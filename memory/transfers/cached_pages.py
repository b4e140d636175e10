"""Host images of cached blocks and checkpoints: the tier below the page pool.

Tests: tests/memory/transfers/test_cached_pages.py, tests/simulation
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from ..host.budget import HostBudget
from ..host.fault_log import FaultLog
from ..pages.block import Block, Cached, KeptState, Medium, WindowPages
from ..pages.pool import IntegrityError
from .transfer import ExecutorLost

if TYPE_CHECKING:
    from ..pages.eviction import RestoreCosts
    from ..pages.prefix import PrefixCache
    from .pages_ahead import PagesAhead
    from .swap_backend import SwapBackend

logger = logging.getLogger(__name__)

COPY_SECONDS = 1.0
"""The most seconds that a clean stop waits for a device's copy of a page: far more than that takes."""


_COPIES = "copies of cached pages to host memory"


class Below(Protocol):
    """The tier below host memory."""

    def save(self, block: Block) -> None:
        """Keep what there are images of, unless that was done; it returns at once."""
        ...

    def save_path(self, block: Block) -> None:
        """Keep some of what comes before a block whose pages leave the pool, from the root on."""
        ...

    def leaves(self, block: Block) -> None:
        """Keep what there are images of, which are about to be dropped, as far as there is room for them."""
        ...

    def let_go(self, block: Block) -> None:
        """Note that a block's images are about to be dropped, and need not be kept."""
        ...


class CachedPages:
    """Images of pages that the prefix cache knows, one for each page, within the host memory budget.

    A page is copied when it is evicted, where that is done at once. A device's pages are copied before that, see
    `PagesAhead`: an eviction finds the images, or does without.

    A block's images are dropped together, and not before those of its descendants, unless the block has pages. So they
    are offered to the budget while nothing depends on them. Images that are about to be copied back are held.
    """

    def __init__(
        self,
        backend: SwapBackend,
        budget: HostBudget,
        prefix: PrefixCache,
        costs: RestoreCosts,
        page_bytes: int,
        windowed: Sequence[int],
        clock: Callable[[], float],
    ) -> None:
        """windowed: page groups with a window."""
        self._backend, self._budget, self._prefix = backend, budget, prefix
        self.costs = costs
        self._page_bytes = page_bytes
        self._windowed = frozenset(windowed)
        self._clock = clock
        self.ahead: PagesAhead | None = None
        """Copies pages before they leave; None: they are copied when they do."""
        self.disk: Below | None = None
        """Where blocks are written; None: nowhere."""
        self.num_bytes = 0
        self._faults = FaultLog(logger)
        self._held: set[Block] = set()
        self._wanted: set[Block] = set()
        budget.join(self, self._num_bytes_behind)

    # -- for the prefix cache

    def save(self, block: Block, groups: Iterable[int]) -> None:
        """Make images of a block's pages in some groups, as far as there is room for them and it is not too late."""
        missing = [group for group in groups if block.pages[group] and group not in block.images]
        if self.ahead is None and missing and self.admit(block, len(missing), block):
            for group in missing:
                if (copied := self._copy_out(block.pages[group])) is None:
                    break
                self._put(block, group, copied[0])
            self.offer(block)
        if self.disk is not None:
            self.disk.save(block)
            self.disk.save_path(block)

    def save_state(self, state: KeptState) -> None:
        """Make images of a checkpoint's pages, if there is room for them and it is not too late."""
        if self.ahead is None and not state.images and self.admit(state, len(state.pages), state.block):
            images = [copied[0] for page in state.pages if (copied := self._copy_out(page)) is not None]
            if len(images) == len(state.pages):
                self._put_state(state, images)
            self.offer(state.block)
        if self.disk is not None:
            self.disk.save(state.block)

    def put(self, item: Block | KeptState, groups: Sequence[int], images: Sequence[Any]) -> None:
        """Keep images that were copied ahead. groups: of each, if they are of a block."""
        if isinstance(item, KeptState):
            if not item.images:
                self._put_state(item, list(images))
            self.offer(item.block)
            return
        for group, image in zip(groups, images, strict=True):
            if group not in item.images:
                self._put(item, group, image)
        self.offer(item)

    def page_left(self, page: int) -> None:
        """Void a copy of a page that is in flight."""
        if self.ahead is not None:
            self.ahead.page_left(page)

    def void_copies(self) -> None:
        """Void all copies in flight."""
        if self.ahead is not None:
            self.ahead.void_all()

    def adopt(self, block: Block, images: dict[int, Any], state: list[Any], accepted: int) -> bool:
        """Give a block images that were read from a file; False, and the block is forgotten if it has nothing else, if
        there is no room for them, or they are too few.
        """
        missing = [group for group in images if group not in block.images]
        keeps_state = bool(state) and block.checkpoint is None
        count = len(missing) + len(state) * keeps_state
        if count and self.admit(block, count, block):
            for group in missing:
                self._put(block, group, images[group])
            if keeps_state:
                block.checkpoint = KeptState(block, (), accepted)
                self._put_state(block.checkpoint, state)
        if not block.is_resident and not self._is_whole(block):
            self._prefix.forget(block)
            return False
        self.offer(block)
        return True

    def offer(self, block: Block) -> None:
        """Update whether a block's images may be dropped, and when."""
        budget, own = self._budget, block.images
        is_leaf = block.is_resident or not block.children
        state = block.checkpoint
        if block.holds or not own or not is_leaf:
            budget.withdraw(block)
        else:
            self._offer(block, len(own), block, is_copy=block.is_resident and self._has_time(block.pages))
        if block.in_windows is not None:
            count = len(self._windowed & own.keys())
            if block.holds or is_leaf or not count:
                budget.withdraw(block.in_windows)
            else:
                self._offer(block.in_windows, count, block, is_copy=False)
        if state is not None and state.images:
            if block.holds:
                budget.withdraw(state)
            else:
                self._offer(state, len(state.images), block, is_copy=bool(state.pages) and self._has_time(state.pages))

    def forget(self, block: Block) -> None:
        """Drop a block's images, and those of its checkpoint."""
        if self.disk is not None:
            self.disk.let_go(block)
        self._budget.withdraw(block)
        if block.in_windows is not None:
            self._budget.withdraw(block.in_windows)
        self._drop_images(block, list(block.images))
        if block.checkpoint is not None:
            self.forget_state(block.checkpoint)

    def forget_state(self, state: KeptState) -> None:
        """Drop a checkpoint's images."""
        if self.disk is not None:
            self.disk.let_go(state.block)
        self._budget.withdraw(state)
        self.num_bytes -= len(state.images) * self._page_bytes
        state.images = []

    # -- for requests

    def hold(self, blocks: Sequence[Block]) -> None:
        """Keep the images of blocks while they are copied back."""
        self._held.update(blocks)
        for block in blocks:
            block.holds += 1
            self.offer(block)

    def let_go(self, blocks: Sequence[Block]) -> None:
        """End `hold`."""
        for block in blocks:
            block.holds -= 1
            if not block.holds:
                self._held.discard(block)
            if block.is_known:
                self.offer(block)

    @property
    def is_holding(self) -> bool:
        """True while images are about to be copied back."""
        return bool(self._held)

    def want(self, blocks: Iterable[Block]) -> None:
        """Drop the images of blocks last: a waiting request begins with them. They may have none yet."""
        for block in blocks:
            block.waiting += 1
            self._wanted.add(block)
            if block.is_known:
                self.offer(block)

    def unwant(self, blocks: Iterable[Block]) -> None:
        """End `want`."""
        for block in blocks:
            block.waiting -= 1
            if not block.waiting:
                self._wanted.discard(block)
            if block.is_known:
                self.offer(block)

    # -- for the budget

    def is_loose(self, item: Hashable) -> bool:
        """True: images are offered only while they may be dropped."""
        return True

    def drop(self, item: Hashable) -> None:
        """Drop the images of an item."""
        assert isinstance(item, Cached)
        if self.disk is not None:
            self.disk.leaves(item if isinstance(item, Block) else item.block)
        if isinstance(item, KeptState):
            self.forget_state(item)
        elif isinstance(item, WindowPages):
            self._drop_images(item.block, [group for group in item.block.images if group in self._windowed])
        else:
            self._drop_images(item, list(item.images))
        self._prefix.dropped(item)

    def _num_bytes_behind(self) -> int:
        """Bytes of images that are offered once those of their descendants have been dropped."""
        held = 0
        for block in self._held | self._wanted:
            held += len(block.images) + (0 if block.checkpoint is None else len(block.checkpoint.images))
        return self.num_bytes - held * self._page_bytes - self._budget.offered_bytes(self)

    def check_integrity(self) -> None:
        """Raise IntegrityError unless the images in the cache have as many bytes as are counted."""
        count = 0
        for root in self._prefix.roots():
            stack = list(root.children.values())
            while stack:
                block = stack.pop()
                stack.extend(block.children.values())
                count += len(block.images) + (0 if block.checkpoint is None else len(block.checkpoint.images))
        if count * self._page_bytes != self.num_bytes:
            raise IntegrityError(
                f"cached pages have {count} images of {self._page_bytes} bytes, {self.num_bytes} bytes are counted"
            )

    # --

    def admit(self, item: Cached, count: int, block: Block) -> bool:
        """Make room for so many images; False if what would leave for them is worth more."""
        cost = count * self.costs.prefix_page
        return self._budget.admit(self, item, count * self._page_bytes, cost, block.uses, depth=block.depth)

    def _offer(self, item: Cached, count: int, block: Block, *, is_copy: bool) -> None:
        """is_copy: the pool has the pages, too: they can be copied again."""
        seconds = self.costs.swapped_page if is_copy else self.costs.prefix_page
        size, is_wanted = count * self._page_bytes, block.waiting > 0
        self._budget.offer(self, item, size, count * seconds, block.uses, wanted=is_wanted, depth=block.depth)

    def _has_time(self, pages: Sequence[int]) -> bool:
        """True if pages that the pool has can be copied again before they leave."""
        return self.ahead is None or not self.ahead.may_leave(pages)

    def copy_of(self, page: int) -> Any:
        """Return an image of a page that is not counted. Raises MemoryError if that can't be made."""
        if (copied := self._copy_out(page)) is None:
            raise MemoryError("a page could not be copied to host memory")
        return copied[0]

    def _copy_out(self, page: int) -> tuple[Any] | None:
        """Copy a page; None if there is no memory for it, or the copy fails. Raises ExecutorLost.

        It waits for a device's copy, so that only a clean stop may ask a device.
        """
        try:
            image, transfer = self._backend.copy_out([page])
            deadline = self._clock() + COPY_SECONDS
            while transfer is not None and not transfer.is_done():
                if transfer.has_failed() or self._clock() > deadline:
                    transfer.cancel()
                    return None
                self._backend.wait(COPY_SECONDS)
        except ExecutorLost:
            raise
        except Exception as error:
            about = f"a cached page could not be copied to host memory: {type(error).__name__}: {error}"
            self._faults.failed(_COPIES, type(error).__name__, about)
            return None
        self._faults.worked(_COPIES)
        return (image,)

    def _put(self, block: Block, group: int, image: Any) -> None:
        was_whole = self._is_whole(block)
        block.images[group] = image
        self.num_bytes += self._page_bytes
        if not was_whole and self._is_whole(block):
            self._prefix.tell_stored(block, Medium.HOST)

    def _put_state(self, state: KeptState, images: list[Any]) -> None:
        state.images = images
        self.num_bytes += len(images) * self._page_bytes

    def _is_whole(self, block: Block) -> bool:
        """True if a request can begin with the block's images."""
        return block.has_images(self._windowed)

    def _drop_images(self, block: Block, groups: Sequence[int]) -> None:
        was_whole = self._is_whole(block)
        for group in groups:
            del block.images[group]
        self.num_bytes -= len(groups) * self._page_bytes
        if was_whole and not self._is_whole(block):
            self._prefix.tell_removed(block, Medium.HOST)
