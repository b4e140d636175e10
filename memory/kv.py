"""A request's block table: the KV pages of its tokens, in order."""

from __future__ import annotations

from .pages import PageKind, PagePool
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
        return max(0, -(-num_tokens // self._block_tokens) - len(self.pages))

    def grow(self, num_tokens: int) -> None:
        """Cover `num_tokens` tokens. OutOfPages, and nothing changed, when the pool can't."""
        if missing := self.missing_pages(num_tokens):
            self.pages.extend(self._pool.allocate(missing, PageKind.KV))

    def free(self) -> None:
        """Give back every page; those of known blocks stay cached until they are wanted."""
        pages, self.pages = self.pages, []
        self._prefix.release(pages)
