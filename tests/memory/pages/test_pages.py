"""The page pool against a model of it, and that its integrity check notices every kind of mistake."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from chorus.memory.pages.block_table import BlockTable
from chorus.memory.pages.eviction import EvictionOrder, RestoreCosts
from chorus.memory.pages.pool import IntegrityError, OutOfPages, PageKind, PagePool
from chorus.memory.pages.prefix import PrefixCache
from chorus.memory.pages.states import StateSlots

KINDS = (PageKind.KV, PageKind.ADAPTER, PageKind.SHADOW)


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, keep and give back pages."""

    @initialize(num_pages=st.integers(2, 20))
    def build(self, num_pages):
        self.pool = PagePool(num_pages)
        self.holders: list[tuple[PageKind, list[int]]] = []
        self.kept: set[int] = set()

    @rule(count=st.integers(0, 8), kind=st.sampled_from(KINDS))
    def allocate(self, count, kind):
        free = self.pool.num_free
        if count > free:
            with pytest.raises(OutOfPages, match=f"{count} pages are needed, {free} of"):
                self.pool.allocate(count, kind)
            assert self.pool.num_free == free
            return
        pages = self.pool.allocate(count, kind)
        assert len(set(pages)) == count
        assert PagePool.DUMMY not in pages
        assert not {page for _, held in self.holders for page in held} & set(pages), "a page that is in use"
        self.holders.append((kind, pages))

    @rule(first=st.integers(0, 19), count=st.integers(1, 8))
    def take(self, first, count):
        run = range(first, min(first + count, self.pool.num_pages))
        free = self.pool.num_free
        if any(self.pool.kind(page) is not PageKind.FREE for page in run):
            with pytest.raises(OutOfPages, match="not all of"):
                self.pool.take([run], PageKind.SHADOW)
            assert self.pool.num_free == free
            return
        self.pool.take([run], PageKind.SHADOW)
        self.holders.append((PageKind.SHADOW, run))

    @precondition(lambda self: any(isinstance(held, range) for _, held in self.holders))
    @rule(data=st.data())
    def give_back(self, data):
        indices = [index for index, (_, held) in enumerate(self.holders) if isinstance(held, range)]
        _, pages = self.holders.pop(data.draw(st.sampled_from(indices)))
        free = self.pool.num_free
        self.pool.give_back([pages], PageKind.SHADOW)
        others = self.pool.allocate(free, PageKind.KV)
        assert not set(others) & set(pages), "they are allocated before others"
        self.pool.release(others)

    @precondition(lambda self: any(kind is PageKind.KV for kind, _ in self.holders))
    @rule(data=st.data())
    def share(self, data):
        pages = data.draw(st.sampled_from([pages for kind, pages in self.holders if kind is PageKind.KV]))
        shared = pages[: data.draw(st.integers(0, len(pages)))]
        self.pool.retain(shared)
        self.holders.append((PageKind.KV, shared))

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        _, pages = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(pages)

    def held(self):
        return {page: kind for kind, pages in self.holders for page in pages}

    @precondition(lambda self: PageKind.KV in self.held().values())
    @rule(data=st.data())
    def keep(self, data):
        page = data.draw(st.sampled_from([page for page, kind in self.held().items() if kind is PageKind.KV]))
        self.pool.keep(page)
        self.kept.add(page)

    @precondition(lambda self: self.kept)
    @rule(data=st.data())
    def forget(self, data):
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.forget(page)
        self.kept.remove(page)

    @precondition(lambda self: self.kept - set(self.held()))
    @rule(data=st.data())
    def use_again(self, data):
        page = data.draw(st.sampled_from(sorted(self.kept - set(self.held()))))
        self.pool.retain([page])
        self.holders.append((PageKind.KV, [page]))

    @invariant()
    def books_add_up(self):
        self.pool.check_integrity(self.holders)
        held = self.held()
        cached = self.kept - set(held)
        assert self.pool.num_free == self.pool.num_usable - len(held) - len(cached)
        assert self.pool.count(PageKind.CACHED) == len(cached)
        assert all(self.pool.kind(page) is PageKind.CACHED for page in cached)
        for kind in KINDS:
            assert self.pool.count(kind) == sum(k is kind for k in held.values())
        for page, kind in held.items():
            assert self.pool.kind(page) is kind
            assert self.pool.references(page) == sum(page in pages for _, pages in self.holders)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=50, stateful_step_count=30)


@pytest.mark.parametrize("num_pages", [-1, 0, 1])
def test_pool_needs_a_page_beside_the_dummy(num_pages):
    with pytest.raises(ValueError, match="at least 2"):
        PagePool(num_pages)


def test_dummy_page_is_never_given_out():
    pool = PagePool(5)
    assert sorted(pool.allocate(4, PageKind.KV)) == [1, 2, 3, 4]
    assert pool.kind(PagePool.DUMMY) is PageKind.RESERVED
    with pytest.raises(OutOfPages):
        pool.allocate(1, PageKind.KV)


def test_free_pages_cannot_be_retained_or_released():
    pool = PagePool(4)
    with pytest.raises(IntegrityError, match="page 2 retained while free"):
        pool.retain([2])
    with pytest.raises(IntegrityError, match="page 3 released while free"):
        pool.release([3])
    with pytest.raises(IntegrityError, match="page 0 released while free"):
        pool.release([PagePool.DUMMY])


def test_shared_page_is_free_when_its_last_holder_lets_go():
    pool = PagePool(3)
    pages = pool.allocate(1, PageKind.KV)
    pool.retain(pages)
    pool.release(pages)
    assert pool.num_free == 1
    pool.release(pages)
    assert pool.num_free == 2


def test_kept_page_is_cached_with_its_last_reference_and_free_when_forgotten():
    pool = PagePool(4)
    (page, other) = pool.allocate(2, PageKind.KV)
    pool.retain([page])
    pool.keep(page)
    pool.release([page])
    assert pool.kind(page) is PageKind.KV
    pool.release([page, other])
    assert (pool.kind(page), pool.kind(other), pool.num_free) == (PageKind.CACHED, PageKind.FREE, 2)
    pool.check_integrity([])
    pool.retain([page])
    assert (pool.kind(page), pool.references(page)) == (PageKind.KV, 1)
    pool.forget(page)
    assert pool.kind(page) is PageKind.KV, "a page in use was taken"
    pool.release([page])
    assert pool.num_free == 3


def test_cached_pages_are_not_given_out():
    pool = PagePool(3)
    pages = pool.allocate(2, PageKind.KV)
    pool.keep(pages[0])
    pool.release(pages)
    with pytest.raises(OutOfPages, match="2 pages are needed, 1 of 2 are free"):
        pool.allocate(2, PageKind.KV)
    pool.forget(pages[0])
    assert sorted(pool.allocate(2, PageKind.KV)) == sorted(pages)


def test_only_kv_in_use_can_be_kept():
    pool = PagePool(4)
    (adapter,) = pool.allocate(1, PageKind.ADAPTER)
    for page, kind in ((adapter, "ADAPTER"), (2, "FREE"), (PagePool.DUMMY, "RESERVED")):
        with pytest.raises(IntegrityError, match=f"page {page} is {kind}; only a KV page in use"):
            pool.keep(page)


@pytest.fixture
def held():
    pool = PagePool(8)
    return pool, pool.allocate(2, PageKind.KV), pool.allocate(3, PageKind.ADAPTER)


def test_integrity_holds_for_true_holders(held):
    pool, kv, adapter = held
    pool.check_integrity()
    pool.check_integrity([(PageKind.KV, kv), (PageKind.ADAPTER, adapter)])


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda kv, adapter: [(PageKind.KV, kv)], "has 1 references but 0 holders"),
        (lambda kv, adapter: [(PageKind.KV, kv), (PageKind.KV, kv), (PageKind.ADAPTER, adapter)], "but 2 holders"),
        (lambda kv, adapter: [(PageKind.KV, kv), (PageKind.KV, adapter)], "held as KV but is ADAPTER"),
        (lambda kv, adapter: [(PageKind.KV, [*kv, 7]), (PageKind.ADAPTER, adapter)], "held as KV but is FREE"),
        (lambda kv, adapter: [(PageKind.KV, kv), *[(PageKind.ADAPTER, adapter)] * 2], "has two owners"),
        (lambda kv, adapter: [(PageKind.KV, [0, *kv]), (PageKind.ADAPTER, adapter)], "held as KV but is RESERVED"),
    ],
    ids=["leaked", "held twice", "wrong kind", "free", "two owners", "dummy"],
)
def test_integrity_notices_wrong_holders(held, wrong, message):
    pool, kv, adapter = held
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity(wrong(kv, adapter))


def test_integrity_notices_an_adapter_page_that_is_shared(held):
    pool, kv, adapter = held
    pool.retain(adapter[:1])
    with pytest.raises(IntegrityError, match="has two owners"):
        pool.check_integrity([(PageKind.KV, kv), (PageKind.ADAPTER, adapter), (PageKind.ADAPTER, adapter[:1])])


@pytest.mark.parametrize(
    ("spoil", "message"),
    [  # no method of the pool leads there
        (lambda pool: pool._free.append(pool._free[0]), "on the free list twice"),  # noqa: SLF001
        (lambda pool: pool._free.pop(), "off the free list"),  # noqa: SLF001
        (lambda pool: pool._free.append(1), "page 1 is KV and on the free list"),  # noqa: SLF001
        (lambda pool: pool._kind.__setitem__(1, PageKind.ADAPTER), "differ from the pages' kinds"),  # noqa: SLF001
        (lambda pool: pool._references.__setitem__(1, 0), "page 1 is KV with 0 references"),  # noqa: SLF001
        (lambda pool: pool._references.__setitem__(7, 1), "page 7 is FREE with 1 references"),  # noqa: SLF001
        (lambda pool: pool._kept.__setitem__(3, 1), "page 3 is ADAPTER but kept"),  # noqa: SLF001
        (lambda pool: pool._kept.__setitem__(7, 1), "page 7 is FREE but kept"),  # noqa: SLF001
    ],
)
def test_integrity_notices_spoiled_books(held, spoil, message):
    pool = held[0]
    spoil(pool)
    with pytest.raises(IntegrityError, match=message):
        pool.check_integrity()


def test_block_table_grows_by_whole_pages_and_gives_all_back():
    pool = PagePool(6)
    table = BlockTable(pool, PrefixCache(pool, EvictionOrder(), RestoreCosts(), 4), block_tokens=4)
    assert [table.missing_pages(n) for n in (0, 1, 4, 5, 8, 9)] == [0, 1, 1, 2, 2, 3]
    table.grow(5)
    first = list(table.pages)
    table.grow(3)
    assert table.pages == first, "a table never shrinks as it grows"
    table.grow(9)
    assert table.pages[:2] == first
    assert len(table.pages) == 3
    with pytest.raises(OutOfPages):
        table.grow(21)
    assert len(table.pages) == 3
    table.free()
    assert table.pages == []
    assert pool.num_free == pool.num_usable


def test_a_block_table_holds_the_pages_of_states_too():
    pool = PagePool(9)
    states = StateSlots([pool.allocate(2, PageKind.KV), pool.allocate(2, PageKind.KV)])
    table = BlockTable(pool, PrefixCache(pool, EvictionOrder(), RestoreCosts(), 4), block_tokens=4, states=states)
    table.grow(9)
    assert table.num_held == len(table.held) == 3 + 4
