"""The page pool: who owns which page. It never looks into a page.

One pool serves the KV cache and the adapters, so memory moves between them page by page with no fixed split
(S-LoRA's unified paging, papers/004).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import IntEnum


class PageKind(IntEnum):
    FREE = 0
    RESERVED = 1
    KV = 2
    ADAPTER = 3


class OutOfPages(RuntimeError):
    """Fewer free pages than asked for. Nothing was allocated."""


class IntegrityError(AssertionError):
    """The pool's books do not add up."""


class PagePool:
    """Allocates page ids `0 … num_pages-1`. Page 0 is reserved: padding rows read and write it.

    Every page has a kind and a reference count; KV pages may be shared, adapter pages have one owner.
    """

    DUMMY = 0

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; at least 2 are needed: the dummy page and one to use")
        self.num_pages = num_pages
        self._kind = [PageKind.FREE] * num_pages
        self._references = [0] * num_pages
        self._kind[self.DUMMY] = PageKind.RESERVED
        self._free = list(range(num_pages - 1, 0, -1))  # a stack, lowest page on top
        self._counts = Counter({PageKind.FREE: num_pages - 1, PageKind.RESERVED: 1})

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that can ever be allocated."""
        return self.num_pages - 1

    def count(self, kind: PageKind) -> int:
        return self._counts[kind]

    def kind(self, page: int) -> PageKind:
        return self._kind[page]

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int, kind: PageKind) -> list[int]:
        """Take `count` pages with one reference each. OutOfPages, and nothing taken, when there are too few."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_usable} free")
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._kind[page] = kind
            self._references[page] = 1
        self._counts[PageKind.FREE] -= count
        self._counts[kind] += count
        return pages

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are in use."""
        for page in pages:
            if self._references[page] == 0:
                raise IntegrityError(f"page {page} retained while free")
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference; a page without any is free again."""
        for page in pages:
            references = self._references[page]
            if references == 0:
                raise IntegrityError(f"page {page} released while free")
            self._references[page] = references - 1
            if references == 1:
                kind = self._kind[page]
                self._kind[page] = PageKind.FREE
                self._counts[kind] -= 1
                self._counts[PageKind.FREE] += 1
                self._free.append(page)

    def check_integrity(self, holders: Iterable[tuple[PageKind, Iterable[int]]] | None = None) -> None:
        """Raise IntegrityError unless every page is in exactly one state and the counts add up.

        holders: what the outside believes it holds, as (kind, pages) per holder. When given, every reference count must
        equal the number of holders, and an adapter page must have exactly one.
        """
        free = set(self._free)
        if len(free) != len(self._free):
            raise IntegrityError("a page is on the free list twice")
        actual = Counter(self._kind)
        if any(actual[kind] != self._counts[kind] for kind in PageKind):
            raise IntegrityError(f"counts {dict(self._counts)} differ from the pages' kinds {dict(actual)}")
        for page, (kind, references) in enumerate(zip(self._kind, self._references, strict=True)):
            if (kind is PageKind.FREE) != (page in free):
                raise IntegrityError(f"page {page} is {kind.name} and {'on' if page in free else 'off'} the free list")
            if (references > 0) != (kind in (PageKind.KV, PageKind.ADAPTER)):
                raise IntegrityError(f"page {page} is {kind.name} with {references} references")
        if holders is not None:
            self._check_holders(holders)

    def _check_holders(self, holders: Iterable[tuple[PageKind, Iterable[int]]]) -> None:
        held: Counter[int] = Counter()
        for kind, pages in holders:
            for page in pages:
                if self._kind[page] is not kind:
                    raise IntegrityError(f"page {page} is held as {kind.name} but is {self._kind[page].name}")
                held[page] += 1
                if kind is PageKind.ADAPTER and held[page] > 1:
                    raise IntegrityError(f"adapter page {page} has two owners")
        for page, references in enumerate(self._references):
            if held[page] != references:
                raise IntegrityError(f"page {page} has {references} references but {held[page]} holders")
