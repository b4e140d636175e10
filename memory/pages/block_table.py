"""A request's block table: the KV pages of its tokens, in order."""

from __future__ import annotations

from .pool import PageKind, PagePool
from .prefix import PrefixCache


class BlockTable:
    """Starts with the pages of a matched prefix, grows by whole pages, gives all of them back at once."""

    __slots__ = ("_block_tokens", "_pool", "_prefix", "pages")

    def __init__(self, pool: PagePool, prefix: PrefixCache, block_tokens: int, pages: list[int] | None = None) -> None:
        self._pool = pool
        self._prefix = prefix
        self._block_tokens = block_tokens
        self.pages = [] if pages is None else pages

    def missing_pages(self, num_tokens: int) -> int:
        """Pages to allocate before `num_tokens` tokens fit."""
        missing = -(-num_tokens // self._block_tokens) - len(self.pages)
        return missing if missing > 0 else 0

    def grow(self, num_tokens: int) -> None:
        """Cover `num_tokens` tokens. OutOfPages, and nothing changed, when the pool can't."""
        self.add_pages(self.missing_pages(num_tokens))

    def add_pages(self, count: int) -> None:
        """Grow by `count` pages. OutOfPages, and nothing changed, when the pool can't."""
        self.pages += self._pool.allocate(count, PageKind.KV)

    def hand_over(self) -> BlockTable:
        """Return another table that has the pages from now on; this one has none."""
        pages, self.pages = self.pages, []
        return BlockTable(self._pool, self._prefix, self._block_tokens, pages)

    def free(self) -> None:
        """Give back every page; pages of known blocks stay cached until evicted."""
        pages, self.pages = self.pages, []
        self._prefix.release(pages)
