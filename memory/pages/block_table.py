"""Block tables: the pages of a request's KV, in the order of its tokens, and of its states.

Tests: tests/memory/pages/test_prefix.py, tests/memory/pages/test_pages.py
"""

from __future__ import annotations

from collections.abc import Sequence

from .pool import PageKind, PagePool
from .prefix import PrefixCache
from .states import StateSlots


class BlockTable:
    """A request's KV pages, block by block in the order of its tokens, one page of each page group.

    It starts with the pages of a matched prefix, grows by whole blocks, and frees all of them at once. Pages that no
    later token sees leave earlier (`leave`): in their place stands `PagePool.DUMMY`. It also holds the pages of the
    request's states.
    """

    __slots__ = ("_block_tokens", "_left", "_num_without", "_pool", "_prefix", "_windows", "pages", "states")

    def __init__(
        self,
        pool: PagePool,
        prefix: PrefixCache,
        block_tokens: int,
        pages: list[int] | None = None,
        windows: Sequence[int | None] = (None,),
        states: StateSlots | None = None,
    ) -> None:
        """windows: of each page group. states: None for a model without."""
        self._pool = pool
        self._prefix = prefix
        self._block_tokens = block_tokens
        self._windows = windows
        self.states = states
        self._left = [0] * len(windows)  # blocks whose page has left, of each group
        self.pages = [] if pages is None else pages
        self._num_without = self.pages.count(PagePool.DUMMY)  # places whose page has left

    @property
    def num_held(self) -> int:
        """Number of its pages, without those that have left."""
        held = len(self.pages) - self._num_without
        return held if self.states is None else held + len([*self.states.pages()])

    @property
    def held(self) -> list[int]:
        """Its pages, without those that have left."""
        held = [page for page in self.pages if page]
        if self.states is not None:
            held += self.states.pages()
        return held

    def of_blocks(self, blocks: range) -> list[int]:
        """The pages of some blocks, DUMMY for those that have left."""
        return self.pages[blocks.start * len(self._windows) : blocks.stop * len(self._windows)]

    def missing_pages(self, num_tokens: int) -> int:
        """Pages to allocate before `num_tokens` tokens fit."""
        missing = -(-num_tokens // self._block_tokens) * len(self._windows) - len(self.pages)
        return missing if missing > 0 else 0

    def grow(self, num_tokens: int) -> None:
        """Cover `num_tokens` tokens. Raises OutOfPages, and changes nothing, if the pool has too few pages."""
        self.add_pages(self.missing_pages(num_tokens))

    def add_pages(self, count: int) -> None:
        """Grow by `count` pages of whole blocks. Raises OutOfPages, and changes nothing, if the pool has too few."""
        self.pages += self._pool.allocate(count, PageKind.KV)

    def add_some(self, wanted: Sequence[bool]) -> None:
        """Grow by whole blocks, with pages only where they are `wanted`. Raises OutOfPages as `add_pages`."""
        pages = iter(self._pool.allocate(sum(wanted), PageKind.KV))
        self.pages += [next(pages) if each else PagePool.DUMMY for each in wanted]
        self._num_without += wanted.count(False)

    def leave(self, next_token: int) -> None:
        """Release the pages that neither the token at a position nor a later one sees."""
        released = []
        for group, window in enumerate(self._windows):
            if window is None:
                continue
            behind = min((next_token - window + 1) // self._block_tokens, len(self.pages) // len(self._windows))
            for block in range(self._left[group], behind):
                at = block * len(self._windows) + group
                if self.pages[at]:
                    released.append(self.pages[at])
                    self.pages[at] = PagePool.DUMMY
            self._left[group] = max(self._left[group], behind)
        self._num_without += len(released)
        self._prefix.release(released)

    def hand_over(self) -> BlockTable:
        """Move the pages to a new table and return it; this table becomes empty."""
        pages, self.pages = self.pages, []
        self._num_without = 0
        states, self.states = self.states, None
        return BlockTable(
            self._pool, self._prefix, self._block_tokens, pages=pages, windows=self._windows, states=states
        )

    def free(self) -> None:
        """Drop every page; pages of known blocks stay cached until evicted."""
        pages, self.pages = self.pages, []
        self._num_without = 0
        self._prefix.release(pages)
        if self.states is not None:
            self._prefix.release(list(self.states.pages()))
            self.states = None
