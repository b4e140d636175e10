"""Host images of cached blocks: a block that loses its pages is found again, with the bytes that it had."""

from __future__ import annotations

import pytest

from chorus.memory.pages.block import Medium
from chorus.memory.pages.pool import PagePool

from .cached_memory import PAGE_BYTES, Memory


def test_blocks_that_lose_their_pages_are_found_with_their_bytes():
    memory = Memory()
    memory.store(tokens := list(range(12)))
    memory.evict(3)
    assert memory.pool.num_free == memory.pool.num_usable
    blocks = memory.match(tokens)
    assert [block.images[0] for block in blocks] == [[(1, tuple(tokens[:end]), 0)] for end in (4, 8, 12)]
    assert memory.prefix.usable(blocks, with_images=False) == []
    assert [at for at, _, _ in memory.prefix.absent(blocks)] == [0, 1, 2]
    assert memory.tier.num_bytes == memory.budget.num_bytes == 30
    memory.tier.check_integrity()


def test_the_first_blocks_stay_in_the_pool_while_the_last_are_in_host_memory():
    memory = Memory()
    memory.store(tokens := list(range(12)))
    memory.evict(2)
    blocks = memory.match(tokens)
    assert [block.is_resident for block in blocks] == [True, False, False]
    assert memory.prefix.usable(blocks, with_images=False) == blocks[:1]


@pytest.mark.parametrize("other", [{"version": 2}, {"scope": ("b", "")}])
def test_what_another_version_or_scope_cached_is_not_found_in_host_memory(other):
    memory = Memory()
    memory.store(tokens := list(range(8)))
    memory.evict(2)
    assert memory.match(tokens, **other) == []


def test_a_version_takes_its_images_with_it():
    memory = Memory()
    memory.store(tokens := list(range(8)))
    memory.evict(1)
    memory.prefix.drop_version(1)
    assert (memory.tier.num_bytes, memory.match(tokens)) == (0, [])
    assert memory.pool.num_free == memory.pool.num_usable
    assert not memory.budget.can_spare(1), "nothing is offered any more"


def test_the_deepest_images_go_first_and_none_is_left_without_its_parent():
    memory = Memory(host_pages=2)
    memory.store(tokens := list(range(12)))
    memory.evict(3)
    assert [block.tokens for block in memory.match(tokens)] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    memory.tier.check_integrity()


def test_what_is_dropped_and_has_no_page_is_forgotten():
    memory = Memory()
    memory.store(tokens := list(range(8)))
    memory.evict(1)
    memory.budget.make_room(20 * PAGE_BYTES)
    assert [block.is_resident for block in memory.match(tokens)] == [True]
    memory.evict(1)
    memory.budget.make_room(20 * PAGE_BYTES)
    assert memory.match(tokens) == []
    assert list(memory.prefix.roots()) == []


def test_no_host_memory_or_a_refused_copy_is_as_no_tier():
    for memory in (Memory(host_pages=0), Memory()):
        memory.backend.refuses = True
        memory.store(tokens := list(range(8)))
        memory.evict(2)
        assert memory.match(tokens) == []
        assert memory.tier.num_bytes == 0
        assert memory.pool.num_free == memory.pool.num_usable


def test_blocks_that_have_left_the_pool_are_not_looked_at_when_the_next_one_does():
    """Thousands of conversations may go on from one system prompt, most of them in host memory."""

    class Looked(dict):
        def values(self):
            nonlocal num_looked
            num_looked += len(self)
            return super().values()

    memory, num_looked = Memory(num_pages=32, host_pages=32), 0
    for last in range(16):
        memory.store([0, 1, 2, 3, last, last, last, last])
    (first,) = memory.match([0, 1, 2, 3, 99])
    first.children = Looked(first.children)
    memory.evict(17)
    assert not first.is_resident and len(first.children) == 16 and not first.resident
    assert num_looked <= 32


def test_held_images_stay():
    memory = Memory()
    memory.store(tokens := list(range(8)))
    memory.evict(2)
    blocks = memory.match(tokens)
    memory.tier.hold(blocks)
    memory.budget.make_room(20 * PAGE_BYTES)
    assert memory.match(tokens) == blocks
    memory.tier.let_go(blocks)
    memory.budget.make_room(20 * PAGE_BYTES)
    assert memory.match(tokens) == []


def test_a_block_that_a_request_computed_again_keeps_its_place_in_the_trie():
    memory = Memory()
    memory.store(tokens := list(range(8)))
    memory.evict(2)
    blocks = memory.match(tokens)
    memory.store(tokens)
    assert memory.match(tokens) == blocks
    assert all(block.is_resident for block in blocks)


def test_a_copy_in_host_memory_of_what_the_pool_has_goes_first():
    memory = Memory(host_pages=4)
    memory.store(first := [1] * 8)
    memory.evict(2)
    memory.store(first)
    memory.store(second := [2] * 16)
    for block in reversed(memory.match(second)):
        memory.order.discard(block)
        memory.prefix.evict(block)
    assert len(memory.match(second)) == 4
    assert all(block.is_resident and not block.images for block in memory.match(first))


def test_with_windows_a_request_begins_where_every_group_has_a_page_or_an_image():
    memory = Memory(num_pages=40, host_pages=40, windows=(None, 5))
    memory.store(tokens := list(range(20)))
    memory.evict(3)
    blocks = memory.match(tokens)
    assert len(blocks) == 5
    while memory.order:
        memory.evict(1)
    blocks = memory.match(tokens)
    assert len(blocks) == 5
    assert [(at // 2, group) for at, _, group in memory.prefix.absent(blocks)] == [
        (0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 1)
    ]  # fmt: skip
    del blocks[4].images[1]
    memory.tier.num_bytes -= PAGE_BYTES
    assert memory.match(tokens) == blocks[:4], "the last block lacks the page of its window"


def test_a_request_begins_at_a_checkpoint_in_host_memory():
    memory = Memory(has_states=True)
    memory.store(tokens := list(range(8)), states=1)
    while memory.order:
        memory.evict(1)
    blocks = memory.match(tokens)
    assert len(blocks) == 2
    state = blocks[-1].checkpoint
    assert state is not None
    assert state.images == [[("state", tuple(tokens), 0)]]
    assert memory.prefix.usable(blocks, with_images=False) == []
    memory.tier.forget_state(state)
    memory.prefix.dropped(blocks[-1].checkpoint)
    assert memory.match(tokens) == [], "a block without a checkpoint is no beginning"


def test_clearing_a_tier_leaves_the_other():
    memory = Memory()
    memory.store(tokens := list(range(8)))
    memory.evict(2)
    memory.store(tokens)
    assert memory.prefix.clear({Medium.POOL}) == 2
    assert [block.is_resident for block in memory.match(tokens)] == [False, False]
    memory.store(tokens)
    memory.prefix.clear({Medium.HOST})
    assert [(block.is_resident, block.images) for block in memory.match(tokens)] == [(True, {}), (True, {})]
    memory.evict(1)
    memory.prefix.clear()
    assert (memory.match(tokens), memory.tier.num_bytes) == ([], 0)
    assert memory.pool.num_free == memory.pool.num_usable


def test_pages_in_windows_that_left_are_not_offered_again_when_a_descendant_made_room_for_them():
    memory = Memory(host_pages=2, windows=(None, 3))
    memory.store(tokens := list(range(8)))
    (parent,) = memory.prefix.walk(1, [*tokens[:4], 0])
    memory.pool.retain(parent.pages[:1])  # a request goes on after it
    memory.prefix.release([])
    memory.evict(1)
    child = memory.prefix.walk(1, [*tokens, 0])[1]
    assert not child.is_resident and len(child.images) == 2
    assert memory.order.pop() is parent.in_windows
    memory.prefix.evict(parent.in_windows)
    assert parent.pages[1] == PagePool.DUMMY
    assert not child.is_known, "its images made room"
    assert parent.in_windows not in memory.order
