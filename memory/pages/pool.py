"""The page pool: it owns every page, and never looks into one.

One pool serves the KV cache and the adapters, so memory moves between them page by page with no fixed split (S-LoRA's
unified paging).

Tests: tests/memory/pages/test_pages.py.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from enum import IntEnum
from itertools import chain

import numpy as np


class PageKind(IntEnum):
    """The use of a page; only FREE is false."""

    FREE = 0
    RESERVED = 1
    KV = 2
    ADAPTER = 3
    CACHED = 4
    """Unused KV, kept because a later request may begin with the same tokens."""
    SHADOW = 5
    """Merged weights: a copy of some weight matrices with an adapter added."""


_KINDS = tuple(PageKind)
_FREE, _CACHED = PageKind.FREE, PageKind.CACHED

#: By kind: whether its pages have references; pages of these kinds have one owner, except KV pages.
_HELD = np.array([kind in (PageKind.KV, PageKind.ADAPTER, PageKind.SHADOW) for kind in PageKind])
#: By kind: whether its pages may hold a known block.
_KEPT = np.array([kind in (PageKind.KV, PageKind.CACHED) for kind in PageKind])


class OutOfPages(RuntimeError):
    """Fewer pages are free than requested. Nothing was allocated."""


class IntegrityError(AssertionError):
    """An accounting invariant of the pool is violated."""


class PagePool:
    """Allocates page ids `0 … num_pages-1`. Page 0 is reserved: padding entries read and write it.

    Every page has a kind and a reference count. KV pages may be shared; other pages have one owner. When a KV page
    marked as kept loses its last reference, it becomes CACHED instead of free.
    """

    DUMMY = 0

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ValueError(f"num_pages is {num_pages}; at least 2 are needed: the dummy page and one to use")
        self.num_pages = num_pages
        self._kind = bytearray(num_pages)
        self._references = array("i", bytes(num_pages * array("i").itemsize))
        self._kept = bytearray(num_pages)
        self._kind[self.DUMMY] = PageKind.RESERVED
        self._free = array("i", range(num_pages - 1, 0, -1))  # a stack with the lowest page on top
        self._counts = [0] * len(PageKind)  # by kind, except FREE: `_free` has those
        self._counts[PageKind.RESERVED] = 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_usable(self) -> int:
        """Pages that can ever be allocated."""
        return self.num_pages - 1

    @property
    def num_unused(self) -> int:
        """Pages that are free or cached."""
        return len(self._free) + self._counts[_CACHED]

    def count(self, kind: PageKind) -> int:
        return len(self._free) if kind is _FREE else self._counts[kind]

    def kind(self, page: int) -> PageKind:
        return _KINDS[self._kind[page]]

    def kinds(self) -> np.ndarray:
        """Return the kinds of all pages, `[pages]` uint8. It is a live view: callers must not change it."""
        return np.frombuffer(self._kind, np.uint8)

    def references(self, page: int) -> int:
        return self._references[page]

    def allocate(self, count: int, kind: PageKind) -> list[int]:
        """Allocate `count` pages with one reference each. Raises OutOfPages, and takes none, if there are too few."""
        if count > len(self._free):
            raise OutOfPages(f"{count} pages are needed, {len(self._free)} of {self.num_usable} are free")
        free, kinds, references, counts = self._free, self._kind, self._references, self._counts
        if count == 1:  # the usual case of decoding requests
            pages = [free.pop()]
        else:
            pages = free[: -count - 1 : -1].tolist()
            del free[len(free) - count :]
        for page in pages:
            kinds[page] = kind
            references[page] = 1
        counts[kind] += count
        return pages

    def take(self, runs: Sequence[range], kind: PageKind) -> None:
        """Allocate exactly these pages with one reference each. If one is not free, raise OutOfPages and take none."""
        if any(self._kind[run.start : run.stop].count(_FREE) < len(run) for run in runs):
            raise OutOfPages(f"not all of {sum(map(len, runs))} pages are free")
        self._mark(runs, kind, 1)
        self._counts[kind] += sum(map(len, runs))
        free = np.array(self._free)
        self._free = array("i", free[self.kinds()[free] == _FREE].tobytes())

    def give_back(self, runs: Sequence[range], kind: PageKind) -> None:
        """Free pages of `take`. They are allocated again last, so the same runs can be found again."""
        if any(self._kind[run.start : run.stop].count(kind) < len(run) for run in runs):
            raise IntegrityError(f"not all of {sum(map(len, runs))} pages are {kind.name}")
        self._mark(runs, _FREE, 0)
        self._counts[kind] -= sum(map(len, runs))
        self._free[:0] = array(
            "i", np.concatenate([np.arange(run.start, run.stop, dtype=np.intc) for run in runs]).tobytes()
        )

    def _mark(self, runs: Sequence[range], kind: PageKind, references: int) -> None:
        for run in runs:
            self._kind[run.start : run.stop] = bytes((kind,)) * len(run)
            self._references[run.start : run.stop] = array("i", (references,)) * len(run)

    def retain(self, pages: Iterable[int]) -> None:
        """Add a reference to pages that are in use or cached."""
        for page in pages:
            if self._references[page] == 0:
                if self._kind[page] != _CACHED:
                    raise IntegrityError(f"page {page} retained while free")
                self._move(page, PageKind.KV)
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Drop a reference of each page; a page without references becomes free, or cached if it is kept."""
        references, kept, kinds, counts, free = self._references, self._kept, self._kind, self._counts, self._free
        for page in pages:
            left = references[page] - 1
            if left < 0:
                raise IntegrityError(f"page {page} released while free")
            references[page] = left
            if left == 0:
                if kept[page]:
                    self._move(page, PageKind.CACHED)
                else:
                    counts[kinds[page]] -= 1
                    kinds[page] = _FREE
                    free.append(page)

    def keep(self, page: int) -> None:
        """Make a KV page in use become CACHED when its last reference is dropped."""
        if self._kind[page] != PageKind.KV:
            raise IntegrityError(f"page {page} is {self.kind(page).name}; only a KV page in use can be kept")
        self._kept[page] = 1

    def forget(self, page: int) -> None:
        """Stop keeping a page; a cached page becomes free at once."""
        self._kept[page] = 0
        if self._kind[page] == _CACHED:
            self._counts[_CACHED] -= 1
            self._kind[page] = _FREE
            self._free.append(page)

    def _move(self, page: int, kind: PageKind) -> None:
        kinds, counts = self._kind, self._counts
        counts[kinds[page]] -= 1
        counts[kind] += 1
        kinds[page] = kind

    def check_integrity(self, holders: Iterable[tuple[PageKind, Iterable[int]]] | None = None) -> None:
        """Raise IntegrityError unless every page is in exactly one state and the counts add up.

        holders: the pages that the rest of the engine believes it holds, as (kind, pages) per holder. If given, every
        reference count must equal the number of holders, and a page that is not KV must have exactly one.
        """
        # This runs whenever an engine idles, so NumPy scans the whole pool.
        kinds, references = self.kinds(), np.frombuffer(self._references, np.intc)
        listed = np.bincount(np.array(self._free), minlength=self.num_pages)
        if len(self._free) and listed.max() > 1:
            raise IntegrityError("a page is on the free list twice")
        actual = np.bincount(kinds, minlength=len(PageKind)).tolist()
        if actual[1:] != self._counts[1:]:
            raise IntegrityError(f"counts {self._counts} by kind differ from the pages' kinds {actual}")
        if (page := _first((listed > 0) != (kinds == _FREE))) is not None:
            where = "on" if listed[page] else "off"
            raise IntegrityError(f"page {page} is {self.kind(page).name} and {where} the free list")
        if (page := _first((references > 0) != _HELD[kinds])) is not None:
            raise IntegrityError(f"page {page} is {self.kind(page).name} with {references[page]} references")
        if (page := _first(np.frombuffer(self._kept, bool) & ~_KEPT[kinds])) is not None:
            raise IntegrityError(f"page {page} is {self.kind(page).name} but kept as a cached prefix")
        if holders is not None:
            self._check_holders(holders)

    def _check_holders(self, holders: Iterable[tuple[PageKind, Iterable[int]]]) -> None:
        kinds = self._kind
        held: dict[PageKind, list[int]] = {}
        for kind, pages in holders:
            held.setdefault(kind, []).extend(pages)
        for kind, pages in held.items():
            for page in pages:
                if kinds[page] != kind:
                    raise IntegrityError(f"page {page} is held as {kind.name} but is {self.kind(page).name}")
            if kind is not PageKind.KV and len(pages) > len(set(pages)):
                page = Counter(pages).most_common(1)[0][0]
                raise IntegrityError(f"{kind.name.lower()} page {page} has two owners")
        references = np.frombuffer(self._references, np.intc)
        counts = np.bincount(np.array([*chain.from_iterable(held.values())], np.intc), minlength=self.num_pages)
        if (page := _first(counts != references)) is not None:
            raise IntegrityError(f"page {page} has {references[page]} references but {counts[page]} holders")


def _first(wrong: np.ndarray) -> int | None:
    """The first page that is wrong, if any: `[pages]` bool."""
    page = int(wrong.argmax())
    return page if wrong[page] else None
