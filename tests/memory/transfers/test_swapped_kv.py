"""Images of swapped KV: pages and host memory are given back exactly once, when nothing is copied from or to them."""

from __future__ import annotations

import pytest

from chorus.memory.host.image import HostImage
from chorus.memory.host.images import HostImages
from chorus.memory.pages.block_table import BlockTable
from chorus.memory.pages.eviction import EvictionOrder, RestoreCosts
from chorus.memory.pages.pool import IntegrityError, PageKind, PagePool
from chorus.memory.pages.prefix import PrefixCache
from chorus.memory.transfers.swapped_kv import SwappedKv
from chorus.perf.inline_reads import InlineReads

PAGE_BYTES = 10


class Copy:
    def __init__(self):
        self.done = self.cancelled = self.failed = self.running = False
        self.running = True

    def end(self, *, well=True):
        self.running, self.done, self.failed = False, well and not self.cancelled, not well

    def is_done(self):
        return self.done

    def has_failed(self):
        return self.failed or self.cancelled

    def cancel(self):
        self.cancelled = True

    def is_quiet(self):
        return not self.running


class Backend:
    page_seconds = 1.0

    def __init__(self):
        self.copies = []
        self.at_once = False
        self.refuses = False

    def copy_out(self, pages):
        if self.refuses:
            raise MemoryError("the system has no more")
        return list(pages), self._begin()

    def copy_in(self, image, skip, pages):
        assert len(image) - skip == len(pages)
        return self._begin()

    def _begin(self):
        if self.at_once:
            return None
        self.copies.append(Copy())
        return self.copies[-1]


class Setup:
    def __init__(self, host_pages=8):
        self.pool = PagePool(20)
        self.prefix = PrefixCache(self.pool, EvictionOrder(), RestoreCosts(), 4)
        self.backend = Backend()
        self.images = HostImages(host_pages * PAGE_BYTES, InlineReads())
        self.swapped = SwappedKv(self.backend, self.images.budget, PAGE_BYTES)

    def table(self, num_pages):
        table = BlockTable(self.pool, self.prefix, 4, [])
        table.add_pages(num_pages)
        return table

    def save(self, num_pages=3, *, whole=True):
        table = self.table(num_pages)
        image = self.swapped.swap_out(table, range(num_pages), 4 * num_pages - 1)
        if whole and self.backend.copies:
            self.backend.copies[-1].end()
            self.swapped.finish_copies()
        table.free()
        return image

    @property
    def num_kv(self):
        return self.pool.count(PageKind.KV)


@pytest.fixture
def it():
    return Setup()


def test_pages_are_free_once_they_have_been_copied(it):
    image = it.save(whole=False)
    assert (it.num_kv, it.swapped.frees_pages, image.is_whole) == (3, True, False)
    assert it.swapped.finish_copies() == ([], [])
    it.pool.check_integrity(it.swapped.holders())
    it.backend.copies[0].end()
    assert it.swapped.finish_copies() == ([], [])
    assert (it.num_kv, it.swapped.frees_pages, image.is_whole) == (0, False, True)
    assert it.images.budget.num_bytes == it.swapped.num_bytes == 30


def test_a_copy_that_is_complete_at_once_leaves_the_pages_to_the_table(it):
    it.backend.at_once = True
    table = it.table(2)
    image = it.swapped.swap_out(table, range(2), 7)
    assert image.is_whole
    assert len(table.pages) == it.num_kv == 2
    assert it.swapped.restore(image, table.pages, 0) is None
    assert (len(it.swapped), it.swapped.num_bytes) == (0, 0)


def test_a_copy_back_ends_in_the_pages_of_the_request(it):
    image, table = it.save(), it.table(3)
    transfer = it.swapped.restore(image, table.pages, 0)
    assert not it.swapped.is_loose(image), "it is being copied"
    it.backend.copies[-1].end()
    assert it.swapped.finish_copies() == ([transfer], [])
    assert (len(it.swapped), it.swapped.num_bytes, it.num_kv) == (0, 0, 3)
    assert (it.swapped.num_bytes_out, it.swapped.num_bytes_in) == (30, 30)


def test_a_cancelled_copy_back_keeps_its_pages_and_its_image_until_it_is_quiet(it):
    image, table = it.save(), it.table(3)
    it.swapped.restore(image, table.pages, 0)
    it.swapped.cancel(image, table)
    assert (table.pages, it.num_kv) == ([], 3)
    assert not it.swapped.is_loose(image)
    it.swapped.finish_copies()
    assert it.num_kv == 3
    it.backend.copies[-1].end()
    it.swapped.finish_copies()
    assert (it.num_kv, len(it.swapped)) == (0, 1)
    assert it.swapped.is_loose(image)
    table = it.table(3)
    it.swapped.restore(image, table.pages, 0)
    it.backend.copies[-1].end()
    it.swapped.finish_copies()
    assert len(it.swapped) == 0


def test_a_copy_back_that_fails_is_told_until_it_is_cancelled(it):
    image, table = it.save(), it.table(3)
    transfer = it.swapped.restore(image, table.pages, 0)
    it.backend.copies[-1].end(well=False)
    assert it.swapped.finish_copies() == it.swapped.finish_copies() == ([], [transfer])
    it.swapped.drop(image)
    assert it.swapped.num_bytes == 30, "nobody knows yet what was copied"
    it.swapped.cancel(image, table)
    assert it.swapped.finish_copies() == ([], [])
    assert (it.num_kv, it.swapped.num_bytes, it.swapped.num_dropped) == (0, 0, 1)


def test_a_copy_out_that_fails_loses_the_image_alone(it):
    image = it.save(whole=False)
    it.backend.copies[0].end(well=False)
    it.swapped.finish_copies()
    assert image.is_dropped
    assert (it.num_kv, it.swapped.num_bytes, it.swapped.num_dropped) == (0, 0, 1)


def test_an_image_that_nobody_wants_any_more_holds_its_memory_until_its_copy_ends(it):
    image = it.save(whole=False)
    it.swapped.forget(image)
    it.swapped.finish_copies()
    assert (it.num_kv, it.swapped.num_bytes) == (3, 30)
    it.swapped.check_integrity([])
    it.backend.copies[0].end()
    it.swapped.finish_copies()
    assert (it.num_kv, it.swapped.num_bytes, it.swapped.num_dropped) == (0, 0, 0)


def test_no_host_memory_is_no_swap(it):
    assert it.save(9) is None
    assert it.save(5) is not None
    assert it.save(4) is None, "another request's KV does not give way"
    it.backend.refuses = True
    with pytest.raises(MemoryError):
        it.save(1)
    assert (it.swapped.num_bytes, len(it.swapped), it.swapped.num_out) == (50, 1, 1)
    assert SwappedKv(None, it.images.budget, PAGE_BYTES).swap_out(it.table(1), range(1), 4) is None


def test_swapped_kv_takes_the_place_of_idle_adapters_only(it):
    for key, is_idle in (("busy", False), ("idle", True), ("other", True)):
        it.images.put(key, 20, HostImage(), may_drop=lambda is_idle=is_idle: is_idle)
    assert it.save(4) is not None
    assert [it.images.is_requested(key) for key in ("busy", "idle", "other")] == [True, False, True]
    assert it.save(3) is None
    assert it.images.is_requested("other"), "nothing is dropped in vain"


def test_adapters_that_are_wanted_take_the_place_of_the_oldest_kv(it):
    old, young = it.save(3), it.save(3)
    it.images.put("wanted", 40, HostImage(), may_drop=lambda: False)
    assert (old.is_dropped, young.is_dropped) == (True, False)
    assert it.images.budget.num_bytes == 70


def test_integrity(it):
    image = it.save()
    it.swapped.check_integrity([image])
    with pytest.raises(IntegrityError, match="a request that has ended"):
        it.swapped.check_integrity([])
    it.swapped.num_bytes += 1
    with pytest.raises(IntegrityError, match="31 are counted"):
        it.swapped.check_integrity([image])
