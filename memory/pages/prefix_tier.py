"""The prefix cache's part of the tier below: blocks that leave the page pool for it, and come back.

Tests: tests/memory/transfers/test_cached_pages.py, tests/simulation
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Protocol

from .block import Block, BlockListener, Cached, KeptState, Medium, Root
from .eviction import EvictionOrder


class Tier(Protocol):
    """Keeps images of blocks that lose their pages, and of checkpoints. It tells the cache of what it drops."""

    def save(self, block: Block, groups: Iterable[int]) -> None:
        """Make images of a block's pages in some groups, as far as there is room for them."""
        ...

    def save_state(self, state: KeptState) -> None:
        """Make images of a checkpoint's pages, if there is room for them."""
        ...

    def offer(self, block: Block) -> None:
        """Update whether a block's images may be dropped, and when."""
        ...

    def forget(self, block: Block) -> None:
        """Drop a block's images, and those of its checkpoint."""
        ...

    def forget_state(self, state: KeptState) -> None:
        """Drop a checkpoint's images."""
        ...

    def page_left(self, page: int) -> None:
        """Void a copy of a page that is in flight: the page is about to have another owner."""
        ...

    def void_copies(self) -> None:
        """Void all copies in flight."""
        ...


class BlocksBelow(ABC):
    """What a prefix cache does with blocks that have images in a tier below."""

    tier: Tier | None
    listener: BlockListener | None
    num_blocks: Counter[tuple[int, Medium]]
    """Blocks by adapter version and medium."""
    _order: EvictionOrder
    _windowed: list[int]
    num_groups: int

    def give_back(self, block: Block, pages: Sequence[int], checkpoint: Sequence[int] = ()) -> bool:
        """Give a matched block pages that its images were copied into, which the caller uses; parents come first.

        pages: of each group; DUMMY where nothing was copied. checkpoint: pages of the state after it. Returns False if
        the cache no longer needs some of them: then the caller keeps its pages to itself, and inserts nothing after it.
        """
        parent = block.parent
        if not block.is_known or parent is None or not parent.is_resident:
            return False
        if not block.is_resident:
            self._return(block, pages)
        else:
            for group in filter(pages.__getitem__, range(len(pages))):
                if block.pages[group]:
                    return False
                block.pages[group] = pages[group]
                self._keep_pages(block, (pages[group],))
            self._offer(block)
        if checkpoint:
            state = block.checkpoint
            return state is not None and self.keep_checkpoint(block, checkpoint, state.accepted)
        return True

    def _return(self, block: Block, pages: Sequence[int]) -> None:
        """Give a block that has only images pages again, which the caller uses: they hold the same."""
        parent = block.parent
        assert parent is not None
        block.is_resident = True
        block.pages = list(pages)
        self._keep_pages(block, pages)
        parent.resident[block] = None
        self._offer(parent)
        self.tell_stored(block, Medium.POOL)
        if self.tier is not None:
            self.tier.offer(block)

    def _leave_to_tier(self, block: Block) -> None:
        """Free the pages of a leaf of which there are images."""
        self._order.discard(block)
        self._forget(block, range(len(block.pages)))
        self.tell_removed(block, Medium.POOL)
        block.is_resident = False
        parent = block.parent
        assert parent is not None
        del parent.resident[block]
        self._offer(parent)
        if self.tier is not None:
            self.tier.offer(block)

    def forget_images(self, block: Block) -> None:
        """Forget a block's images, which could not be copied back, and all that is useless without them."""
        if not block.is_known or self.tier is None:
            return
        if not block.is_resident:
            self.forget(block)
            return
        self.tier.forget(block)
        if block.checkpoint is not None and not block.checkpoint.pages:
            block.checkpoint = None
            self._prune(block)

    def dropped(self, item: Cached) -> None:
        """Forget what has lost its images, and has no page either; the tier below calls it."""
        if isinstance(item, KeptState):
            if not item.pages:
                item.block.checkpoint = None
                self._prune(item.block)
        elif isinstance(item, Block) and not item.is_resident:
            self.forget(item)

    def clear(self, mediums: Container[Medium] = frozenset(Medium)) -> int:
        """Forget what no request uses in some mediums; return the number of blocks that were forgotten there.

        A block in the pool stays in host memory if it has images there and only the pool is cleared.
        """
        found: list[Block] = list(self.roots())
        for block in found:
            found += block.children.values()
        count = 0
        if Medium.HOST in mediums and self.tier is not None:
            self.tier.void_copies()
        for block in reversed(found):
            if block.parent is None or not block.is_known:
                continue
            if Medium.HOST in mediums and _has_loose_images(block):
                count += not block.is_resident
                self._clear_images(block)
            if Medium.POOL in mediums and block.is_known and block.is_resident:
                count += self._clear_pages(block)
        return count if self.num_groups else _count_forgotten(found)

    def _clear_images(self, block: Block) -> None:
        if not block.is_resident and block.children:
            return  # a descendant is being copied back
        self.forget_images(block)

    def _clear_pages(self, block: Block) -> bool:
        """Free a block's unused pages, and forget it if none of its images is left; False if a request uses it."""
        state = block.checkpoint
        if state is not None and state in self._order:
            if state.images:
                self._free_checkpoint(state)
            else:
                self._forget_checkpoint(block)
        if block.in_windows is not None and block.in_windows in self._order:
            self._order.discard(block.in_windows)
            self._forget(block, [group for group in self._windowed if self._is_unused(block.pages[group])])
            self._offer(block)
        if block not in self._order:
            return False  # it is in use, or has no pages: then it is forgotten with its checkpoint
        if self.tier is not None and block.has_images(self._windowed):
            self._leave_to_tier(block)
        else:
            self.forget(block)
        return True

    def tell_stored(self, block: Block, medium: Medium) -> None:
        """Count a block that is in a medium from now on, and tell the listener."""
        self.num_blocks[block.version, medium] += 1
        if self.listener is not None:
            self.listener.stored(block.version, block.scope, block, medium)

    def tell_removed(self, block: Block, medium: Medium) -> None:
        """Count a block as no longer in a medium, and tell the listener."""
        place = block.version, medium
        self.num_blocks[place] -= 1
        if not self.num_blocks[place]:
            del self.num_blocks[place]
        if self.listener is not None:
            self.listener.removed(block.number, medium)

    # -- of the cache

    @abstractmethod
    def roots(self) -> Iterator[Root]:
        """The root of every trie."""

    @abstractmethod
    def forget(self, block: Block) -> None:
        """Forget a leaf, with its descendants that have only images."""

    @abstractmethod
    def keep_checkpoint(self, block: Block, pages: Sequence[int], accepted: int = 0) -> bool:
        """Keep the state after a block's tokens; False if that is impossible, or done."""

    @abstractmethod
    def _keep_pages(self, block: Block, pages: Sequence[int]) -> None:
        """Note whose block pages are."""

    @abstractmethod
    def _offer(self, block: Block) -> None:
        """Make a block evictable if it is an unused leaf, or else its unused pages in windows."""

    @abstractmethod
    def _prune(self, block: Block) -> None:
        """Forget a block without page groups if nothing needs it, and then those before it."""

    @abstractmethod
    def _is_unused(self, page: int) -> bool:
        """True for a known page that no request uses."""

    @abstractmethod
    def _forget(self, block: Block, groups: Iterable[int]) -> None:
        """Forget a block's pages in some groups, and free those that are unused."""

    @abstractmethod
    def _forget_checkpoint(self, block: Block) -> None:
        """Forget a block's checkpoint, with its images."""

    @abstractmethod
    def _free_checkpoint(self, checkpoint: KeptState) -> None:
        """Free a checkpoint's pages."""


def _has_loose_images(block: Block) -> bool:
    """True if there are images of a block or of its checkpoint, and no request is about to copy them."""
    state = block.checkpoint
    return not block.holds and bool(block.images or (state is not None and state.images))


def _count_forgotten(blocks: Sequence[Block]) -> int:
    """The number of blocks, without roots, that are not known any more."""
    return sum(block.parent is not None and not block.is_known for block in blocks)
