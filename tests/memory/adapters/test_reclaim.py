"""Making room: all or nothing, adapters and prefix blocks in one order, and never anything in use."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorus.memory.adapters.reclaimer import Reclaimer
from chorus.memory.adapters.store import AdapterStore
from chorus.memory.host.images import HostImages
from chorus.memory.pages.eviction import EvictionOrder, RestoreCosts
from chorus.memory.pages.pool import PageKind, PagePool
from chorus.memory.pages.prefix import PrefixCache
from chorus.memory.pages.shadow import ShadowPages
from chorus.perf.inline_reads import InlineReads

from ..fakes import FakeBackend


class FixedCosts(RestoreCosts):
    """Costs stay as the test sets them."""

    def observe(self, name, seconds_per_page):
        pass


class Memory:
    """10 pages, blocks of one token."""

    def __init__(self, **costs):
        self.pool = PagePool(11)
        order, costs = EvictionOrder(), FixedCosts(**costs)
        self.images = HostImages(1000, InlineReads())
        self.store = AdapterStore(self.pool, FakeBackend(), self.images, order, costs, 10, clock=lambda: 0.0)
        self.prefix = PrefixCache(self.pool, order, costs, 1)
        self.reclaimer = Reclaimer(self.pool, order, self.store, self.prefix, ShadowPages(self.pool, order))

    def adapter(self, name, size, uses=1):
        """An idle resident adapter."""
        adapter = self.store.register(name, Path(size))
        for _ in range(uses):
            self.store.acquire(adapter)
            self.store.release(adapter)
        return adapter

    def block(self, token, uses=1):
        """An unused block."""
        pages = self.pool.allocate(1, PageKind.KV)
        block = self.prefix.insert(0, None, [token], pages[:1])
        self.prefix.release(pages)
        for _ in range(uses - 1):
            self.prefix.release(self.prefix.take([block], 1))
        return block

    def check(self, kv=()):
        self.pool.check_integrity([*self.store.holders(), (PageKind.KV, kv)])

    def left(self):
        """Resident adapters and cached tokens."""
        adapters = {adapter.name for adapter in self.store.resident()}
        return adapters | {block.tokens[0] for block in self.prefix.by_page.values()}


def test_free_pages_are_used_before_anything_is_evicted():
    memory = Memory()
    memory.adapter("a", "four")
    memory.block(1)
    assert memory.reclaimer.available == 10
    assert memory.reclaimer.make_room(0)
    assert memory.reclaimer.make_room(5)
    assert memory.left() == {"a", 1}


def test_no_more_is_evicted_than_is_needed():
    memory = Memory(prefix_page=1.0, host_adapter_page=2.0)
    memory.adapter("a", "four")
    for token in (1, 2, 3):
        memory.block(token)
    for _ in range(2):
        assert memory.reclaimer.make_room(4)
        assert memory.left() == {"a", 2, 3}
    assert memory.reclaimer.make_room(6)
    assert memory.left() == {"a"}
    assert memory.pool.num_free == 6
    assert memory.reclaimer.make_room(7)
    assert memory.pool.num_free == 10


def test_room_is_all_or_nothing():
    memory = Memory()
    memory.adapter("a", "three")
    memory.block(1)
    kv = memory.pool.allocate(4, PageKind.KV)
    assert memory.reclaimer.available == 6
    assert not memory.reclaimer.make_room(7)
    assert memory.left() == {"a", 1}, "something was given up for nothing"
    assert memory.reclaimer.make_room(6)
    assert memory.left() == set()
    memory.check(kv)


@pytest.mark.parametrize(
    ("costs", "block_uses", "adapter_uses", "first"),
    [
        ({"prefix_page": 1.0, "host_adapter_page": 2.0}, 1, 1, "block"),
        ({"prefix_page": 2.0, "host_adapter_page": 1.0}, 1, 1, "adapter"),
        ({"prefix_page": 1.0, "host_adapter_page": 2.0}, 3, 1, "adapter"),
        ({"prefix_page": 3.0, "host_adapter_page": 1.0}, 1, 4, "block"),
    ],
)
def test_adapters_and_blocks_compete_by_cost_and_use(costs, block_uses, adapter_uses, first):
    """No fixed split: whichever is worth less per page goes, whatever its size."""
    memory = Memory(**costs)
    memory.adapter("a", "four", adapter_uses)
    memory.block(1, block_uses)
    assert memory.reclaimer.make_room(6)
    assert memory.left() == ({"a"} if first == "block" else {1})


def test_adapter_whose_image_is_gone_costs_a_read_from_disk():
    memory = Memory(prefix_page=5.0, host_adapter_page=1.0, disk_adapter_page=9.0)
    adapter = memory.adapter("a", "four")
    memory.block(1)
    memory.images.drop(adapter)
    memory.store.acquire(adapter)
    memory.store.release(adapter)
    assert memory.reclaimer.make_room(6)
    assert memory.left() == {"a"}


def test_adapter_that_a_waiting_request_wants_goes_last():
    memory = Memory(prefix_page=5.0, host_adapter_page=1.0)
    wanted, other = memory.adapter("wanted", "two"), memory.adapter("other", "two")
    memory.block(1)
    memory.store.hold(wanted)
    assert memory.reclaimer.make_room(8)
    assert memory.left() == {"wanted"}
    memory.store.acquire(other)
    memory.store.release(other)
    memory.store.let_go(wanted)
    assert memory.reclaimer.make_room(8)
    assert memory.left() == {"other"}, "nobody waits for it any more"


def test_what_is_in_use_is_never_taken():
    memory = Memory()
    busy = memory.adapter("busy", "three")
    memory.store.acquire(busy)
    pages = memory.prefix.take([memory.block(1)], 1)
    memory.adapter("idle", "one")
    memory.block(2)
    assert memory.reclaimer.available == 6
    assert memory.reclaimer.reclaim_all() == 2
    assert memory.left() == {"busy", 1}
    assert not memory.reclaimer.make_room(7)
    memory.check(pages)


def test_reclaim_all_gives_back_chains_and_adapters():
    memory = Memory()
    memory.adapter("a", "three")
    pages = memory.pool.allocate(4, PageKind.KV)
    parent = None
    for token, page in enumerate(pages):
        parent = memory.prefix.insert(0, parent, [token], [page])
    memory.prefix.release(pages)
    assert memory.pool.num_free == 3
    assert memory.reclaimer.reclaim_all() == 7
    assert memory.reclaimer.reclaim_all() == 0
    assert memory.pool.num_free == memory.pool.num_usable
    memory.check()


def made_runs(memory, sizes, wished=None):
    """Runs that were found and cleared, in place of the shadow weights that there were."""
    runs = memory.reclaimer.find_runs(sizes, wished)
    if runs is not None:
        memory.reclaimer.shadow.give_up()
        assert all(memory.reclaimer.clear(run) is not None for run in runs)
    return runs


def test_runs_evict_as_little_as_they_can_and_nothing_that_is_wanted_or_used():
    memory = Memory()
    kv = memory.pool.allocate(2, PageKind.KV)  # 1, 2
    memory.block(1)  # 3
    idle = memory.adapter("idle", "two")  # 4, 5
    wanted = memory.adapter("wanted", "two")  # 6, 7
    memory.store.hold(wanted)
    assert made_runs(memory, [4]) is None
    assert memory.left() == {"idle", "wanted", 1}
    assert made_runs(memory, [3]) == [range(8, 11)]
    assert memory.left() == {"idle", "wanted", 1}
    assert made_runs(memory, [3, 1]) == [range(8, 11), range(5, 6)]
    assert not idle.pages
    assert memory.left() == {"wanted", 1}
    assert made_runs(memory, [3, 3]) == [range(8, 11), range(3, 6)]
    assert memory.left() == {"wanted"}
    memory.check(kv)


def test_runs_evict_what_follows_a_cached_block_with_it():
    memory = Memory()
    pages = memory.pool.allocate(10, PageKind.KV)
    block = None
    for token, page in enumerate(pages):
        block = memory.prefix.insert(0, block, [token], [page])
    memory.prefix.release(pages)
    assert made_runs(memory, [2]) == [range(9, 11)]
    assert len(memory.prefix) == 8
    assert made_runs(memory, [9]) is not None
    assert memory.pool.num_free >= 9
    memory.check()


def test_a_run_in_use_or_wanted_by_now_is_left_as_it_is():
    memory = Memory()
    memory.block(1)  # 1
    wanted = memory.adapter("wanted", "two")  # 2, 3
    assert memory.reclaimer.find_runs([10]) == [range(1, 11)]
    memory.store.hold(wanted)
    assert memory.reclaimer.clear(range(1, 11)) is None
    memory.store.let_go(wanted)
    kv = memory.pool.allocate(1, PageKind.KV)  # 4
    assert memory.reclaimer.clear(range(1, 11)) is None
    assert memory.left() == {"wanted", 1}
    memory.pool.release(kv)
    assert memory.reclaimer.clear(range(1, 11)) == 3
    assert memory.left() == set()
    memory.check()


def test_shadow_pages_in_use_go_after_all_but_what_is_wanted():
    memory = Memory(host_adapter_page=1.0, prefix_page=1.0)
    wanted, _ = memory.adapter("wanted", "two"), memory.adapter("idle", "two")
    memory.store.hold(wanted)
    memory.block(1)
    gone = []
    shadow = memory.reclaimer.shadow
    shadow.on_gone = lambda: gone.append(True)
    shadow.take([range(6, 10)])
    assert memory.pool.count(PageKind.SHADOW) == 4
    assert memory.reclaimer.available == 10
    assert memory.reclaimer.spare == 6
    assert memory.reclaimer.make_room(4)
    assert (memory.left(), gone) == ({"wanted"}, [])
    assert memory.reclaimer.make_room(5)
    assert (memory.left(), gone, shadow.runs) == ({"wanted"}, [True], [])
    assert memory.reclaimer.make_room(10)
    memory.check()


def test_runs_for_another_shadow_take_the_place_of_the_last():
    memory = Memory()
    shadow = memory.reclaimer.shadow
    shadow.take([range(4, 11)])
    assert made_runs(memory, [11]) is None
    assert shadow.runs
    assert made_runs(memory, [5, 3]) == [range(6, 11), range(3, 6)]
    assert memory.pool.num_free == 10
    assert made_runs(memory, []) == []
    memory.check()


def test_runs_that_are_wished_for_are_taken_where_they_can_be_had():
    memory = Memory()
    kv = memory.pool.allocate(2, PageKind.KV)  # 1, 2
    memory.block(1)  # 3
    idle = memory.adapter("idle", "two")  # 4, 5
    assert made_runs(memory, [3], [range(2, 5)]) == [range(8, 11)], "a page of it is in use"
    assert memory.left() == {"idle", 1}
    assert made_runs(memory, [2, 1], [range(3, 5), range(8, 9)]) == [range(3, 5), range(8, 9)]
    assert not idle.pages
    assert memory.left() == set()
    memory.check(kv)


def test_shadow_pages_at_rest_compete():
    memory = Memory(host_adapter_page=1.0, prefix_page=1.0)
    memory.block(1)
    shadow = memory.reclaimer.shadow
    shadow.take([range(7, 11)])
    shadow.rest(0.5, 1)
    assert memory.reclaimer.spare == memory.reclaimer.available == 10
    assert memory.reclaimer.make_room(6)
    assert (memory.left(), shadow.runs) == ({1}, [])
    memory.check()
