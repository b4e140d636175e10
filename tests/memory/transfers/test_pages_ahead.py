"""Copies of cached pages before they leave the pool: what is copied, when, and what of it is kept."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chorus.memory.pages.block import Medium
from chorus.memory.pages.pool import PageKind
from chorus.memory.transfers import pages_ahead
from chorus.memory.transfers.cached_pages import CachedPages
from chorus.memory.transfers.pages_ahead import PagesAhead

from .cached_memory import PAGE_BYTES, LateMemory

TOKENS = list(range(12))


def images_of(memory, tokens=TOKENS, version=1):
    return [block.images for block in memory.match(tokens, version)]


def test_an_eviction_finds_what_was_copied_before():
    memory = LateMemory(horizon=20)
    memory.store(TOKENS)
    memory.settle()
    assert all(block.is_resident for block in memory.match(TOKENS))
    memory.evict(3)
    assert images_of(memory) == [{0: [(1, tuple(TOKENS[:end]), 0)]} for end in (4, 8, 12)]
    assert memory.tier.num_bytes == memory.budget.num_bytes == 3 * PAGE_BYTES
    assert memory.pool.num_free == memory.pool.num_usable
    memory.tier.check_integrity()


def test_nothing_is_copied_while_the_pool_has_room():
    memory = LateMemory(num_pages=20, horizon=10)
    memory.store(list(range(9 * 4)))
    memory.settle()
    assert memory.pool.num_free == 10
    assert memory.backend.copies == []
    memory.store([99] * 4)
    memory.settle()
    assert len(memory.backend.copies) == 1, "one page that leaves next"


@given(st.randoms(use_true_random=False), st.sampled_from([(None,), (None, None)]))
def test_exactly_what_leaves_next_is_copied(draw, windows):
    groups = len(windows)
    memory = LateMemory(num_pages=1 + 60 * groups, host_pages=1000, horizon=1000, windows=windows)
    kept = []
    for _ in range(draw.randint(2, 8)):
        tokens = [draw.choice([1, 2])] * 4 * draw.randint(1, 3) + [draw.randrange(9)] * 4 * draw.randint(0, 3)
        missing = len(tokens) // 4 - len(memory.match(tokens))
        if missing * groups <= memory.pool.num_free:
            memory.store(tokens)
        if draw.random() < 0.3:  # another hit: it is worth more
            held = memory.prefix.take(memory.match(tokens), len(tokens))
            memory.prefix.release(held) if draw.random() < 0.5 else kept.append(held)
        if draw.random() < 0.3 and memory.order:
            memory.evict(1)
    memory.ahead.horizon = memory.pool.num_free + draw.randint(1, 20)
    memory.ahead.advance()
    wanted = {page for copy in memory.backend.copies for page in copy.pages}
    wanted |= {page for block in memory.ahead._wanted for page in block.pages if page}  # noqa: SLF001
    left, page_left = [], memory.ahead.page_left
    memory.ahead.page_left = lambda page: (left.append(page), page_left(page))
    while memory.order and memory.pool.num_free < memory.ahead.horizon:
        memory.evict(1)
    assert set(left) == wanted


def test_a_page_that_leaves_before_its_copy_has_ended_has_no_image():
    memory = LateMemory(num_pages=4, horizon=3)
    memory.store(TOKENS)
    memory.ahead.advance()
    memory.evict(3)
    assert memory.match(TOKENS) == []
    memory.store(other := [7] * 12)
    assert memory.budget.num_bytes == 3 * PAGE_BYTES, "the copies still write to host memory"
    memory.settle()
    assert memory.match(TOKENS) == []
    memory.evict(3)
    assert images_of(memory, other) == [{0: [(1, tuple(other[:end]), 0)]} for end in (4, 8, 12)]
    assert memory.ahead.num_void_pages == 3


def test_a_block_that_comes_back_into_the_same_page_gets_no_image_of_what_was_there_meanwhile():
    memory = LateMemory(num_pages=2, horizon=1)
    memory.store([1] * 4)
    memory.ahead.advance()
    memory.evict(1)
    memory.store([2] * 4)
    (copy,) = memory.backend.copies
    copy.end()
    memory.evict(1)
    memory.store([1] * 4)
    (block,) = memory.match([1] * 4)
    assert block.pages == copy.pages
    memory.settle()
    assert block.images == {0: [(1, (1,) * 4, 0)]}


def test_what_a_request_uses_again_is_not_copied():
    memory = LateMemory(num_pages=4, horizon=3)
    memory.store(TOKENS)
    blocks = memory.match(TOKENS)
    memory.prefix.take(blocks, 13)
    memory.settle()
    assert memory.backend.copies == []


def test_a_copy_in_flight_is_kept_if_a_request_uses_its_page_meanwhile():
    """It only reads it."""
    memory = LateMemory(num_pages=4, horizon=3)
    memory.store(TOKENS)
    memory.ahead.advance()
    memory.prefix.take(memory.match(TOKENS), 13)
    memory.settle()
    assert all(block.images for block in memory.match(TOKENS))


def test_a_version_that_is_gone_leaves_no_image_even_of_copies_in_flight():
    memory = LateMemory(num_pages=4, horizon=3)
    memory.store(TOKENS)
    memory.ahead.advance()
    memory.prefix.drop_version(1)
    memory.settle()
    assert (memory.tier.num_bytes, memory.budget.num_bytes) == (0, 0)
    memory.tier.check_integrity()


@pytest.mark.parametrize("mediums", [{Medium.HOST}, set(Medium)])
def test_clearing_host_memory_voids_copies_in_flight(mediums):
    memory = LateMemory(num_pages=4, horizon=3)
    memory.store(TOKENS)
    memory.ahead.advance()
    memory.prefix.clear(mediums)
    memory.backend.end()
    for copy in list(memory.ahead._copies):  # noqa: SLF001 - without beginning others
        memory.ahead._finish(copy)  # noqa: SLF001
    assert (memory.tier.num_bytes, memory.budget.num_bytes) == (0, 0)


def test_no_more_is_in_flight_than_the_limits_allow(monkeypatch):
    monkeypatch.setattr(pages_ahead, "MOST_PAGES", 2)
    memory = LateMemory(num_pages=4, horizon=3)
    memory.store(TOKENS)
    memory.ahead.advance()
    assert len(memory.backend.coming) == 2
    memory.ahead.advance()
    assert len(memory.backend.coming) == 2
    memory.backend.end(1)
    memory.ahead.advance()
    assert len(memory.backend.coming) == 2


def test_no_more_bytes_are_begun_in_a_second_than_the_limit_allows(monkeypatch):
    monkeypatch.setattr(pages_ahead, "MOST_BYTES", PAGE_BYTES)
    monkeypatch.setattr(pages_ahead, "BYTES_PER_SECOND", PAGE_BYTES)
    memory = LateMemory(num_pages=4, horizon=3)
    memory.store(TOKENS)
    for _ in range(5):
        memory.ahead.advance()
        memory.backend.end()
    assert len(memory.backend.copies) == 1
    memory.now += 0.5
    memory.ahead.advance()
    memory.backend.end()
    assert len(memory.backend.copies) == 2, "half a page too early, which the next one pays for"
    memory.now += 0.4
    memory.ahead.advance()
    assert len(memory.backend.copies) == 2
    memory.now += 100.0
    memory.settle()
    assert len(memory.backend.copies) == 3


def test_a_large_checkpoint_is_begun_in_parts_and_kept_whole(monkeypatch):
    monkeypatch.setattr(pages_ahead, "MOST_PAGES", 2)
    memory = LateMemory(num_pages=10, horizon=9, has_states=True)
    memory.store([1] * 4, states=5)
    for _ in range(20):
        memory.ahead.advance()
        assert len(memory.backend.coming) <= 4
        memory.backend.end()
    while memory.order:
        memory.evict(1)
    (block,) = memory.match([1] * 4)
    assert block.checkpoint is not None
    assert block.checkpoint.images == [[("state", (1,) * 4, at)] for at in range(5)]
    memory.tier.check_integrity()


def test_a_checkpoint_of_which_a_page_has_left_is_not_kept():
    memory = LateMemory(num_pages=10, horizon=9, has_states=True)
    memory.store([1] * 4, states=2)
    memory.ahead.advance()
    (block,) = memory.match([1] * 4)
    memory.prefix.evict(block.checkpoint)
    memory.settle()
    assert block.checkpoint is None
    assert memory.match([1] * 4) == []
    memory.tier.check_integrity()


def test_with_windows_every_group_that_is_there_is_copied():
    memory = LateMemory(num_pages=40, host_pages=40, horizon=39, windows=(None, 5))
    memory.store(tokens := list(range(20)))
    memory.evict(1)
    memory.settle()
    while memory.order:
        memory.evict(1)
    blocks = memory.match(tokens)
    assert len(blocks) >= 4
    for count, block in enumerate(blocks, 1):
        assert block.images == {group: [(1, tuple(tokens[: 4 * count]), group)] for group in block.images}


def test_a_refused_or_failing_copy_costs_a_hit_and_no_more(caplog):
    memory = LateMemory(num_pages=4, horizon=3)
    memory.store(TOKENS)
    memory.backend.refuses = True
    memory.ahead.advance()
    assert "could not be copied" in caplog.text
    assert memory.budget.num_bytes == 0
    memory.backend.refuses = False
    memory.evict(1)
    memory.store([9] * 4)
    memory.ahead.advance()
    for copy in memory.backend.copies:
        copy.fails = True
    memory.settle()
    assert memory.budget.num_bytes == memory.tier.num_bytes
    memory.evict(3)
    memory.tier.check_integrity()


@pytest.mark.parametrize("is_used", [False, True])
def test_a_copy_is_worth_its_restore_unless_its_page_is_in_use(is_used):
    """What is in use can be copied again before it leaves."""

    class Other:
        num_bytes = 0

        def is_loose(self, item):
            return True

    memory = LateMemory(num_pages=4, host_pages=3, horizon=3)
    memory.store(TOKENS)
    memory.settle()
    assert memory.budget.excess(1) > 0
    if is_used:
        memory.prefix.take(blocks := memory.match(TOKENS), 13)
        for block in blocks:
            memory.tier.offer(block)
    cost = memory.costs.prefix_page / 2
    assert memory.budget.admit(Other(), "half", PAGE_BYTES, cost, 1) == is_used


def test_other_items_count_as_pages_that_leave():
    class Adapter:
        num_pages = 3

    memory = LateMemory(num_pages=4, horizon=3)
    memory.order.add(Adapter(), 3, 0.0, 1)
    memory.store(TOKENS)
    memory.settle()
    assert memory.backend.copies == []


# -- faults that the tests above must find


def find(test, *arguments):
    with pytest.raises(AssertionError):
        test(*arguments)


def test_a_copy_that_is_kept_although_its_page_has_left_is_found(monkeypatch):
    monkeypatch.setattr(CachedPages, "page_left", lambda self, page: None)
    find(test_a_page_that_leaves_before_its_copy_has_ended_has_no_image)
    find(test_a_block_that_comes_back_into_the_same_page_gets_no_image_of_what_was_there_meanwhile)


def test_a_checkpoint_of_mixed_pages_is_found(monkeypatch):
    begin = PagesAhead._begin  # noqa: SLF001

    def turned(self, item):
        begin(self, item)
        if self._copies:
            self._copies[-1].transfer.images.reverse()

    monkeypatch.setattr(PagesAhead, "_begin", turned)
    find(test_a_large_checkpoint_is_begun_in_parts_and_kept_whole, monkeypatch)


def test_groups_that_are_mixed_up_are_found(monkeypatch):
    put = CachedPages.put
    monkeypatch.setattr(CachedPages, "put", lambda self, item, groups, images: put(self, item, groups, images[::-1]))
    find(test_with_windows_every_group_that_is_there_is_copied)


def test_nothing_is_offered_to_the_budget_by_copies_in_flight():
    memory = LateMemory(num_pages=4, horizon=3)
    memory.store(TOKENS)
    memory.ahead.advance()
    assert not memory.budget.can_spare(1)
    assert not memory.ahead.is_loose(TOKENS[0])
    assert memory.pool.count(PageKind.CACHED) == 3
