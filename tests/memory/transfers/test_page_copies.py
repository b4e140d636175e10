"""Copies of cached pages, each with an image of its own."""

from __future__ import annotations

import pytest

from chorus.memory.transfers.page_copies import PageFetch, PageSave
from chorus.memory.transfers.swap_backend import CopyMode


class Backend:
    """Begins copies that end when the test says so."""

    copying = CopyMode.BACKGROUND

    def __init__(self, refused_after=1 << 30):
        self.left = refused_after
        self.copies = []

    def copy_in(self, image, skip, pages):
        return self._begin()

    def copy_out(self, pages, *, ahead=False):
        return list(pages), self._begin()

    def _begin(self):
        if not self.left:
            raise OSError("no copy")
        self.left -= 1
        self.copies.append(Copy())
        return self.copies[-1]


class Copy:
    is_cancelled = is_ended = False

    def is_done(self):
        return self.is_ended and not self.is_cancelled

    def has_failed(self):
        return self.is_cancelled

    def cancel(self):
        self.is_cancelled = True

    def is_quiet(self):
        return self.is_ended


def test_a_fetch_that_is_refused_midway_ends_once_what_was_begun_is_quiet():
    """Its pages are being written until then, and must not be others'."""
    fetch = PageFetch(backend := Backend(refused_after=2), ["a", "b", "c"], [1, 2, 3], 10)
    assert fetch.has_failed() and not fetch.is_done() and not fetch.is_complete
    assert [copy.is_cancelled for copy in backend.copies] == [True, True]
    assert not fetch.is_quiet()
    for copy in backend.copies:
        copy.is_ended = True
    assert fetch.is_quiet()


def test_a_fetch_that_is_refused_at_once_raises():
    with pytest.raises(OSError, match="no copy"):
        PageFetch(Backend(refused_after=0), ["a"], [1], 10)


def test_a_later_refusal_cancels_the_rest():
    save = PageSave(backend := Backend(refused_after=3), [1, 2, 3, 4], 2)
    assert len(backend.copies) == 2
    with pytest.raises(OSError, match="no copy"):
        save.is_done()
    assert save.has_failed() and not save.is_quiet()
    for copy in backend.copies:
        copy.is_ended = True
    assert save.is_quiet()


def test_pages_are_saved_a_few_at_a_time():
    save = PageSave(backend := Backend(), [4, 5, 6], 2)
    assert save.images == [[4], [5]]
    assert not save.is_done()
    assert save.images == [[4], [5], [6]]
    for copy in backend.copies:
        copy.is_ended = True
    assert save.is_done()
    assert save.is_complete
