"""Copies of cached prefixes from host memory into pages of the requests that begin with them.

Tests: tests/core/test_prefix_tiers.py, tests/simulation
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ...memory.adapters.reclaimer import Reclaimer
from ...memory.pages.block import Block
from ...memory.pages.eviction import RestoreCosts
from ...memory.pages.layout import PageLayout
from ...memory.pages.pool import PageKind, PagePool
from ...memory.pages.prefix import PrefixCache
from ...memory.transfers.cached_pages import CachedPages
from ...memory.transfers.swapped_kv import KvImage, SwappedKv
from ...memory.transfers.transfer import ExecutorLost
from ..requests.prefix_fetch import Fetch
from ..requests.request import Request

logger = logging.getLogger(__name__)


class CopyFailed(Exception):
    """KV could not be copied from host memory, and is forgotten there."""


@dataclass(eq=False)
class PrefixCopies:
    """Decides whether a prefix is copied or computed again, and copies it. host: None: nothing is kept there."""

    host: CachedPages | None
    pool: PagePool
    prefix: PrefixCache
    reclaimer: Reclaimer
    swapped: SwappedKv
    layout: PageLayout
    costs: RestoreCosts
    clock: Callable[[], float]
    pages_per_token: float
    """See `PageLayout.pages_per_token`."""

    num_hit_tokens: int = 0
    """Prefix tokens that were copied."""
    num_recomputed_tokens: int = 0
    """Those that were computed again, because that takes less time."""
    seconds: float = 0.0
    """Time of the copies."""

    def are_worth_it(self, blocks: list[Block], resident: list[Block]) -> bool:
        """True if copying what is in host memory is measured to take less time than computing the tokens again."""
        copied = len(self.prefix.absent(blocks)) + (self.layout.state_pages if blocks[-1].checkpoint else 0)
        computed = (len(blocks) - len(resident)) * self.layout.block_tokens * self.pages_per_token
        return copied * self.costs.host_prefix_page < computed * self.costs.prefix_page

    def pass_over(self, num_tokens: int) -> None:
        """Count prefix tokens that a request computes again though they are in host memory."""
        self.num_recomputed_tokens += num_tokens
        self.costs.doubt("host_prefix_page")

    def plan(self, blocks: list[Block]) -> Fetch:
        """Hold the images that a request needs of its blocks until `end`."""
        assert self.host is not None
        self.host.hold(blocks)
        return Fetch(blocks, self.prefix.absent(blocks), self.clock())

    def end(self, fetch: Fetch | None) -> None:
        """Let go of images."""
        if fetch is not None and self.host is not None:
            self.host.let_go(fetch.blocks)

    def begin(self, request: Request, fetch: Fetch) -> None:
        """Begin to copy what a request needs of its blocks into pages of its own; `restoring` is set unless all is
        there at once. Raises CopyFailed: then the caller releases the request, and calls `give_up`.
        """
        table, images, pages = request.block_table, list[Any](), list[int]()
        self.reclaimer.make_room(len(fetch.places))
        for (at, block, group), page in zip(
            fetch.places, self.pool.allocate(len(fetch.places), PageKind.KV), strict=True
        ):
            table.pages[at] = page
            images.append(block.images[group])
            pages.append(page)
        if fetch.checkpoint:
            state = fetch.blocks[-1].checkpoint
            assert state is not None
            images += state.images
            pages += fetch.checkpoint
        fetch.image = KvImage(images, 0, range(len(fetch.blocks)), [], num_tokens=request.num_computed_tokens)
        request.fetch = fetch
        try:
            request.restoring = self.swapped.fetch(fetch.image, pages)
        except ExecutorLost:
            raise
        except Exception:
            logger.exception("cached KV could not be copied back for request %s", request.id)
            raise CopyFailed from None
        if request.restoring is None:
            self.finish(request, fetch)

    def finish(self, request: Request, fetch: Fetch) -> None:
        """Give the blocks the pages that their images were copied into."""
        step, pages = self.layout.pages_per_block, request.block_table.pages
        fetched: dict[int, list[int]] = {}
        for at, _, group in fetch.places:
            fetched.setdefault(at // step, [PagePool.DUMMY] * step)[group] = pages[at]
        if not self._give_back(fetch, fetched):
            request.caching = False
        self.end(fetch)
        request.fetch = None
        seconds, count = self.clock() - fetch.begun, len(fetch.places) + len(fetch.checkpoint)
        self.costs.observe("host_prefix_page", seconds / count)
        self.seconds += seconds
        copied = len(fetched) if step else len(fetch.blocks)  # a state alone stands for all tokens before it
        self.num_hit_tokens += copied * self.layout.block_tokens

    def _give_back(self, fetch: Fetch, fetched: dict[int, list[int]]) -> bool:
        """Give blocks pages by their index; False if the cache no longer needs some of them."""
        nothing, is_needed = [PagePool.DUMMY] * self.layout.pages_per_block, True
        for index, block in enumerate(fetch.blocks):
            own = fetched.get(index)
            if own is None and block.is_resident:
                continue
            checkpoint = fetch.checkpoint if block is fetch.blocks[-1] else ()
            is_needed = is_needed and self.prefix.give_back(block, own or nothing, checkpoint)
        last = fetch.blocks[-1]
        if fetch.checkpoint and len(fetch.blocks) - 1 not in fetched and last.is_resident:
            state = last.checkpoint
            if state is not None and not state.pages:
                self.prefix.keep_checkpoint(last, fetch.checkpoint, state.accepted)
        return is_needed

    def give_up(self, fetch: Fetch) -> None:
        """Forget the blocks whose images could not be copied back: they are computed again."""
        for block in reversed(fetch.blocks):
            self.prefix.forget_images(block)
