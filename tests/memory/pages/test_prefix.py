"""The prefix cache: the longest known beginning of the same version and tokens, and nothing else."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chorus.memory.pages.block import BASE_VERSION
from chorus.memory.pages.block_table import BlockTable
from chorus.memory.pages.eviction import EvictionOrder, RestoreCosts
from chorus.memory.pages.pool import PageKind, PagePool
from chorus.memory.pages.prefix import PrefixCache

STEP = 4


class Memory:
    def __init__(self, num_pages=20, step=STEP):
        self.pool = PagePool(num_pages)
        self.order = EvictionOrder()
        self.prefix = PrefixCache(self.pool, self.order, RestoreCosts(), step)
        self.step = step

    def start(self, version, tokens):
        """A request that computes `tokens`, and uses and fills the cache. Returns its block table and hits."""
        blocks = self.prefix.match(version, tokens)
        table = BlockTable(self.pool, self.prefix, self.step, self.prefix.take(blocks, len(tokens)))
        table.grow(len(tokens))
        parent = blocks[-1] if blocks else None
        for index in range(len(blocks), len(tokens) // self.step):
            piece = tokens[index * self.step : (index + 1) * self.step]
            parent = self.prefix.insert(version, parent, piece, table.pages[index : index + 1])
            if parent is None:
                break
        return table, len(blocks)

    def evict_one(self):
        block = self.order.pop()
        self.prefix.evict(block)
        return block

    def evict_first_page(self):
        """Evict a block; return the page that it had."""
        block = self.order.pop()
        page = block.pages[0]
        self.prefix.evict(block)
        return page

    def matched(self, version, tokens):
        return [block.pages[0] for block in self.prefix.match(version, tokens)]


@pytest.fixture
def memory():
    return Memory()


def test_a_request_starts_from_the_blocks_of_an_earlier_one(memory):
    tokens = list(range(11))
    first, _ = memory.start(1, tokens)
    pages = list(first.pages)
    first.free()
    assert [memory.pool.kind(page) for page in pages] == [PageKind.CACHED, PageKind.CACHED, PageKind.FREE]
    second, hits = memory.start(1, tokens)
    assert hits == 2
    assert second.pages[:2] == pages[:2]
    assert (memory.prefix.num_hit_tokens, memory.prefix.num_query_tokens) == (8, 22)


def test_blocks_of_running_requests_are_shared(memory):
    tokens = list(range(9))
    first, _ = memory.start(1, tokens)
    second, hits = memory.start(1, [*tokens, 9])
    assert hits == 2
    assert second.pages[:2] == first.pages[:2]
    assert second.pages[2] != first.pages[2], "a block that is not full was shared"
    assert [memory.pool.references(page) for page in second.pages] == [2, 2, 1]
    first.free()
    assert memory.pool.kind(second.pages[0]) is PageKind.KV
    second.free()
    memory.pool.check_integrity([])


@pytest.mark.parametrize(("length", "hits"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3), (30, 3)])
def test_at_least_one_token_is_left_to_compute(memory, length, hits):
    tokens = list(range(30))
    memory.start(1, tokens[:12])
    assert len(memory.prefix.match(1, tokens[:length])) == hits


def test_only_equal_tokens_of_the_same_version_match(memory):
    tokens = list(range(12))
    memory.start(1, tokens)
    assert memory.matched(2, [*tokens, 0]) == []
    assert memory.matched(BASE_VERSION, [*tokens, 0]) == []
    for changed in range(12):
        other = [*tokens, 0]
        other[changed] = 99
        assert len(memory.matched(1, other)) == changed // STEP
    assert memory.matched(1, [*tokens[4:], 0, 0]) == [], "a block matched after other tokens than its own"


def test_scopes_share_nothing_and_leave_nothing_behind(memory):
    tokens = tuple(range(STEP))
    pages = memory.pool.allocate(2, PageKind.KV)
    assert memory.prefix.insert(1, None, tokens, pages[:1], ("a", "")) is not None
    assert memory.prefix.insert(1, None, tokens, pages[1:2], ("b", "")) is not None
    assert [block.pages[0] for block in memory.prefix.match(1, (*tokens, 9), ("b", ""))] == [pages[1]]
    assert memory.prefix.match(1, (*tokens, 9), ("", "")) == memory.prefix.match(1, (*tokens, 9)) == []
    memory.prefix.release(pages)
    memory.evict_one()
    assert [root.scope for root in memory.prefix.roots()] == [("b", "")]
    memory.evict_one()
    assert list(memory.prefix.roots()) == []


def test_block_that_is_known_is_not_made_known_twice(memory):
    """Two requests compute the same block at once: the second one's page stays its own."""
    first = memory.pool.allocate(1, PageKind.KV)
    second = memory.pool.allocate(1, PageKind.KV)
    block = memory.prefix.insert(1, None, [1, 2, 3, 4], first[:1])
    assert block is not None
    assert memory.prefix.insert(1, None, [1, 2, 3, 4], second[:1]) is block and block.pages == first
    memory.prefix.release(second)
    assert memory.pool.kind(second[0]) is PageKind.FREE
    memory.prefix.release(first)
    assert memory.pool.kind(first[0]) is PageKind.CACHED
    assert len(memory.prefix) == 1


def test_a_block_before_one_in_use_is_evicted_if_nobody_uses_it(memory):
    """A request goes on from a block that it has a page of its own for; the block after it is forgotten first."""
    first, second = (memory.pool.allocate(2, PageKind.KV) for _ in range(2))
    known = memory.prefix.insert(1, None, [1, 2, 3, 4], first[:1])
    memory.prefix.release(first)
    assert memory.prefix.insert(1, None, [1, 2, 3, 4], second[:1]) is known
    after = memory.prefix.insert(1, known, [5, 6, 7, 8], second[1:])
    assert [block.pages for block in memory.prefix.match(1, [*range(1, 9), 9])] == [first[:1], second[1:]]
    assert len(memory.order) == 1 and memory.evict_first_page() == first[0]
    assert not after.is_known and memory.pool.kind(second[1]) is PageKind.KV
    memory.prefix.release(second)
    assert len(memory.order) == len(memory.prefix) == 0


def test_a_block_before_unused_ones_is_evicted_after_them(memory):
    """The request that went on from it has ended."""
    first, second = (memory.pool.allocate(2, PageKind.KV) for _ in range(2))
    known = memory.prefix.insert(1, None, [1, 2, 3, 4], first[:1])
    memory.prefix.release(first)
    memory.prefix.insert(1, known, [5, 6, 7, 8], second[1:])
    memory.prefix.release(second)
    assert [memory.evict_first_page() for _ in range(2)] == [second[1], first[0]]


def test_leaves_are_evicted_before_what_they_follow(memory):
    table, _ = memory.start(1, list(range(12)))
    pages = list(table.pages)
    table.free()
    assert len(memory.order) == 1, "only the leaf may go"
    assert [memory.evict_first_page() for _ in range(3)] == pages[::-1]
    assert len(memory.prefix) == len(memory.order) == 0
    assert memory.pool.num_free == memory.pool.num_usable


def test_deeper_leaves_go_first_among_equals(memory):
    short, _ = memory.start(1, [1] * 4)
    long, _ = memory.start(1, [2] * 12)
    tail = long.pages[2]
    long.free()
    short.free()
    assert memory.evict_first_page() == tail


def test_often_used_blocks_stay(memory):
    popular, _ = memory.start(1, [1] * 4)
    popular.free()
    for _ in range(3):
        memory.start(1, [1] * 5)[0].free()
    once, _ = memory.start(1, [2] * 4)
    page = once.pages[0]
    once.free()
    assert memory.evict_first_page() == page


def test_blocks_in_use_are_not_evictable(memory):
    table, _ = memory.start(1, list(range(8)))
    assert len(memory.order) == 0
    other, _ = memory.start(1, list(range(5)))
    table.free()
    assert len(memory.order) == 1
    memory.evict_one()
    assert len(memory.order) == 0
    assert len(memory.matched(1, list(range(9)))) == 1
    other.free()
    assert memory.evict_one().tokens == (0, 1, 2, 3)


def test_unused_counts_the_pages_that_taking_makes_unreclaimable(memory):
    table, _ = memory.start(1, list(range(12)))
    blocks = memory.prefix.match(1, list(range(13)))
    assert memory.prefix.unused(blocks) == 0
    table.free()
    assert memory.prefix.unused(blocks) == 3


def test_version_that_is_gone_takes_its_blocks_along(memory):
    kept, _ = memory.start(BASE_VERSION, [1] * 9)
    for version in (1, 2):
        memory.start(version, [1] * 9)[0].free()
    memory.prefix.drop_version(1)
    memory.prefix.drop_version(7)
    assert memory.matched(1, [1] * 9) == []
    assert len(memory.matched(2, [1] * 9)) == len(memory.matched(BASE_VERSION, [1] * 9)) == 2
    assert memory.pool.count(PageKind.CACHED) == 2
    memory.pool.check_integrity([(PageKind.KV, kept.pages)])
    while len(memory.order):
        memory.evict_one()
    assert memory.matched(2, [1] * 9) == []


class PrefixMachine(RuleBasedStateMachine):
    """Requests of several versions come, grow and go; a page holds the last tokens written to it."""

    @initialize(num_pages=st.integers(4, 16), step=st.sampled_from([1, 2, 3]))
    def build(self, num_pages, step):
        self.memory = Memory(num_pages, step)
        self.content: dict[int, tuple[int, tuple[int, ...]]] = {}
        self.running: list[tuple[int, BlockTable]] = []

    @rule(version=st.integers(0, 2), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12))
    def start(self, version, tokens):
        pool, step = self.memory.pool, self.memory.step
        blocks = self.memory.prefix.match(version, tokens)
        wanted = -(-len(tokens) // step) - len(blocks)
        if wanted > pool.num_free + pool.count(PageKind.CACHED) - self.memory.prefix.unused(blocks):
            return
        for index, block in enumerate(blocks):
            assert self.content[block.pages[0]] == (version, tuple(tokens[: (index + 1) * step]))
        pages = self.memory.prefix.take(blocks, len(tokens))
        while pool.num_free < wanted:
            self.memory.evict_one()
        table = BlockTable(pool, self.memory.prefix, step, pages)
        table.grow(len(tokens))
        parent = blocks[-1] if blocks else None
        for index in range(len(blocks), len(table.pages)):
            end = (index + 1) * step
            self.content[table.pages[index]] = (version, tuple(tokens[:end]))
            if end <= len(tokens) and (parent is not None or index == 0):
                parent = self.memory.prefix.insert(
                    version, parent, tokens[index * step : end], table.of_blocks(range(index, index + 1))
                )
        self.running.append((version, table))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data):
        _, table = self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))
        table.free()

    @precondition(lambda self: len(self.memory.order))
    @rule()
    def evict(self):
        free = self.memory.pool.num_free
        self.memory.evict_one()
        assert self.memory.pool.num_free == free + 1

    @rule(version=st.integers(0, 2))
    def drop(self, version):
        if not any(running == version for running, _ in self.running):
            self.memory.prefix.drop_version(version)
            assert self.memory.matched(version, [0, 0, 0, 0]) == []

    @invariant()
    def books_add_up(self):
        memory = self.memory
        memory.pool.check_integrity([(PageKind.KV, table.pages) for _, table in self.running])
        assert memory.pool.count(PageKind.CACHED) <= len(memory.prefix)

    def teardown(self):
        """Every cached page can be had leaf by leaf."""
        if not hasattr(self, "memory"):
            return
        for _, table in self.running:
            table.free()
        while len(self.memory.order):
            self.memory.evict_one()
        assert self.memory.pool.num_free == self.memory.pool.num_usable
        assert len(self.memory.prefix) == 0


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=80, stateful_step_count=30)


class WindowMemory(Memory):
    """Two page groups, the second with a window of six tokens."""

    windows = (None, 6)

    def __init__(self, num_pages=40):
        super().__init__(num_pages)
        self.prefix = PrefixCache(self.pool, self.order, RestoreCosts(), STEP, self.windows)

    def start(self, version, tokens):
        """A request that computes `tokens`, whose pages then leave the window."""
        blocks = self.prefix.match(version, tokens)
        taken = self.prefix.take(blocks, len(tokens))
        table = BlockTable(self.pool, self.prefix, STEP, taken, self.windows)
        table.grow(len(tokens))
        parent = blocks[-1] if blocks else None
        for index in range(len(blocks), len(tokens) // STEP):
            piece, pages = tokens[index * STEP : (index + 1) * STEP], table.of_blocks(range(index, index + 1))
            arguments = version, parent, piece, pages
            parent = self.prefix.insert(*arguments) or self.prefix.refill(*arguments)
        table.leave(len(tokens))
        return table, len(blocks)


class TestWindows:
    def test_pages_behind_the_window_leave_and_stay_cached(self):
        memory = WindowMemory()
        table, _ = memory.start(1, list(range(20)))
        assert [bool(page) for page in table.pages] == [True, False] * 3 + [True, True] * 2
        assert memory.pool.count(PageKind.CACHED) == 3
        memory.pool.check_integrity([(PageKind.KV, table.held)])

    def test_a_request_begins_where_the_window_is_cached(self):
        """It takes the pages in its window, and of blocks before them only those without a window."""
        memory = WindowMemory()
        memory.start(1, list(range(20)))[0].free()
        blocks = memory.prefix.match(1, list(range(21)))
        pages = memory.prefix.take(blocks, 21)
        assert [bool(page) for page in pages] == [True, False] * 3 + [True, True] * 2

    def test_pages_in_windows_are_evicted_before_their_block(self):
        """Then a request can begin only in front of the gap, or behind it by as much as the window sees."""
        memory = WindowMemory()
        memory.start(1, list(range(20)))[0].free()
        blocks = memory.prefix.match(1, list(range(21)))
        memory.order.discard(blocks[2].in_windows)
        memory.prefix.evict(blocks[2].in_windows)
        assert not blocks[2].pages[1]
        for length, hits in ((21, 5), (17, 2), (13, 2), (9, 2)):
            assert len(memory.prefix.match(1, list(range(length)))) == hits

    def test_lost_pages_are_given_back_by_the_next_request_that_computes_them(self):
        memory = WindowMemory()
        memory.start(1, list(range(20)))[0].free()
        for block in memory.prefix.match(1, list(range(21))):
            memory.order.discard(block.in_windows)
            memory.prefix.evict(block.in_windows)
        assert memory.prefix.match(1, list(range(21))) == []
        memory.start(1, list(range(20)))[0].free()
        assert len(memory.prefix.match(1, list(range(21)))) == 5
        memory.pool.check_integrity([])
        while len(memory.order):
            memory.evict_one()
        assert memory.pool.num_free == memory.pool.num_usable
        assert len(memory.prefix) == 0

    def test_a_model_with_windows_alone_forgets_blocks_without_pages(self):
        memory = WindowMemory()
        memory.windows = (6,)
        memory.prefix = PrefixCache(memory.pool, memory.order, RestoreCosts(), STEP, memory.windows)
        memory.start(1, list(range(20)))[0].free()
        while len(memory.order):
            memory.evict_one()
        assert memory.pool.num_free == memory.pool.num_usable
        assert list(memory.prefix.roots()) == []


class TestCheckpoints:
    @pytest.fixture
    def known(self, memory):
        """Three blocks of one token sequence, unused, with the state after the second."""
        memory.prefix = PrefixCache(memory.pool, memory.order, RestoreCosts(), STEP, has_states=True)
        table, _ = memory.start(1, list(range(12)))
        first, second = memory.prefix.by_page[table.pages[0]], memory.prefix.by_page[table.pages[1]]
        state = memory.pool.allocate(2, PageKind.KV)
        assert memory.prefix.keep_checkpoint(second, state)
        assert not memory.prefix.keep_checkpoint(second, state), "there is one"
        table.free()
        memory.prefix.release(state)
        return first, second, state

    def test_a_request_begins_at_the_last_one(self, memory, known):
        blocks = memory.prefix.match(1, list(range(13)))
        assert blocks == list(known[:2])
        assert memory.prefix.unused(blocks) == 4
        assert memory.prefix.take_checkpoint(blocks[-1]).pages == known[2]
        assert memory.pool.references(known[2][0]) == 1
        assert known[1].checkpoint not in memory.order

    def test_it_is_evicted_by_itself(self, memory, known):
        memory.order.discard(known[1].checkpoint)
        memory.prefix.evict(known[1].checkpoint)
        assert memory.prefix.match(1, list(range(13))) == []
        assert len(memory.prefix) == 3

    def test_it_goes_with_its_block_or_one_of_its_pages(self, memory, known):
        memory.prefix.evict_page(known[2][1])
        assert known[1].checkpoint is None
        assert memory.pool.kind(known[2][0]) is PageKind.FREE
        while len(memory.order):
            memory.evict_one()
        assert memory.pool.num_free == memory.pool.num_usable


class TestBlocksWithoutPages:
    """Of a model whose tokens take no page: a block is known while something needs it."""

    @pytest.fixture
    def memory(self):
        memory = Memory(num_pages=40)
        memory.prefix = PrefixCache(memory.pool, memory.order, RestoreCosts(), STEP, (), has_states=True)
        return memory

    def run(self, memory, tokens, checkpoints=()):
        """A request that computes `tokens` and keeps a state after some of its blocks; returns its last block."""
        prefix, blocks = memory.prefix, memory.prefix.match(1, tokens)
        last = blocks[-1] if blocks else None
        assert prefix.take(blocks, len(tokens)) == []
        prefix.follow(None, last)
        for index in range(len(blocks), len(tokens) // STEP):
            piece = tokens[index * STEP : (index + 1) * STEP]
            block = prefix.insert(1, last, piece, []) or prefix.refill(1, last, piece, [])
            prefix.follow(last, block)
            last = block
            if index in checkpoints:
                state = memory.pool.allocate(2, PageKind.KV)
                assert prefix.keep_checkpoint(last, state)
                prefix.release(state)
        assert last is not None
        return last, len(blocks)

    def known(self, memory):
        found = list(memory.prefix.roots())
        for block in found:
            found += block.children.values()
        return sum(block.parent is not None for block in found)

    def test_they_last_to_the_last_checkpoint(self, memory):
        last, _ = self.run(memory, list(range(40)), checkpoints=(2, 6))
        assert self.known(memory) == 10
        memory.prefix.follow(last, None)
        assert self.known(memory) == 7, "three blocks behind the last checkpoint are of no use"
        _, hits = self.run(memory, list(range(40)))
        assert hits == 7

    def test_what_a_request_goes_on_from_stays(self, memory):
        last, _ = self.run(memory, list(range(16)))
        other, hits = self.run(memory, list(range(24)))
        assert (hits, last.users, other.depth) == (0, 1, 6)
        memory.prefix.follow(other, None)
        assert self.known(memory) == 4
        memory.prefix.follow(last, None)
        assert list(memory.prefix.roots()) == []

    def test_a_checkpoint_takes_its_blocks_along(self, memory):
        """A trie of thousands of blocks goes at once, without a frame for each."""
        last, _ = self.run(memory, list(range(5000 * STEP)), checkpoints=(4999,))
        memory.prefix.follow(last, None)
        assert self.known(memory) == 5000
        assert len(memory.order) == 1
        memory.evict_one()
        assert list(memory.prefix.roots()) == []
        assert memory.pool.num_free == memory.pool.num_usable

    def test_an_earlier_checkpoint_stays(self, memory):
        last, _ = self.run(memory, list(range(24)), checkpoints=(1, 5))
        memory.prefix.follow(last, None)
        later = last.checkpoint
        memory.order.discard(later)
        memory.prefix.evict(later)
        assert self.known(memory) == 2
        assert len(memory.prefix.match(1, list(range(24)))) == 2

    def test_clearing_counts_them(self, memory):
        last, _ = self.run(memory, list(range(24)), checkpoints=(1, 3))
        memory.prefix.follow(last, None)
        assert memory.prefix.clear() == 4
        assert list(memory.prefix.roots()) == []

    def test_a_version_that_goes_takes_the_blocks_of_running_requests(self, memory):
        last, _ = self.run(memory, list(range(24)), checkpoints=(1,))
        memory.prefix.drop_version(1)
        assert not last.is_known
        assert memory.prefix.insert(1, last, [1, 2, 3, 4], []) is None
        memory.prefix.follow(last, None)
        assert memory.pool.num_free == memory.pool.num_usable
