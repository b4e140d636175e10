"""A request's block table: the KV pages of its tokens, in order."""

from __future__ import annotations

from .pages import PageKind, PagePool


class BlockTable:
    """Grows by whole pages of `block_tokens` tokens and gives all of them back at once."""

    __slots__ = ("_block_tokens", "_pool", "pages")

    def __init__(self, pool: PagePool, block_tokens: int) -> None:
        self._pool = pool
        self._block_tokens = block_tokens
        self.pages: list[int] = []

    def missing_pages(self, num_tokens: int) -> int:
        """Pages to allocate before `num_tokens` tokens fit."""
        return max(0, -(-num_tokens // self._block_tokens) - len(self.pages))

    def grow(self, num_tokens: int) -> None:
        """Cover `num_tokens` tokens. OutOfPages, and nothing changed, when the pool can't."""
        if missing := self.missing_pages(num_tokens):
            self.pages.extend(self._pool.allocate(missing, PageKind.KV))

    def free(self) -> None:
        pages, self.pages = self.pages, []
        self._pool.release(reversed(pages))
