"""The places of adapters: tiers, pins, versions, and never a page lost on the way."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest

from chorus.memory.adapters.adapter import Tier
from chorus.memory.adapters.reclaimer import Reclaimer
from chorus.memory.adapters.store import AdapterStore, UnknownAdapter
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.host.image import HostImage
from chorus.memory.host.images import HostImages
from chorus.memory.pages.adapter_layout import AdapterLayout
from chorus.memory.pages.eviction import EvictionOrder, RestoreCosts
from chorus.memory.pages.pool import OutOfPages, PageKind, PagePool
from chorus.memory.pages.prefix import PrefixCache
from chorus.memory.pages.shadow import ShadowPages
from chorus.memory.transfers.transfer import ExecutorLost
from chorus.perf.inline_reads import InlineReads

from ..fakes import FakeBackend, SlowReads

PAGE_BYTES = 10


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def pool():
    return PagePool(11)  # 10 usable


class Memory:
    """A store with all that it shares pages with."""

    def __init__(self, pool, backend, reads, host_bytes=1000):
        order, costs = EvictionOrder(), RestoreCosts()
        self.order = order
        self.costs = costs
        self.images = HostImages(host_bytes, reads)
        self.store = AdapterStore(pool, backend, self.images, order, costs, PAGE_BYTES, clock=lambda: 0.0)
        prefix = PrefixCache(pool, order, costs, 4)
        self.reclaimer = Reclaimer(pool, order, self.store, prefix, ShadowPages(pool, order))


@pytest.fixture
def memory(pool, backend):
    return Memory(pool, backend, InlineReads())


@pytest.fixture
def store(memory):
    return memory.store


@pytest.fixture
def use(memory):
    """`use(a, b)`: load each for a request and let it go again, in this order."""

    def run(*adapters):
        for adapter in adapters:
            start(adapter)
            end(adapter)

    def start(adapter):
        memory.store.hold(adapter)
        if not adapter.pages:
            memory.reclaimer.make_room(adapter.num_pages)
        memory.store.acquire(adapter)

    def end(adapter):
        memory.store.release(adapter)
        memory.store.let_go(adapter)

    run.start, run.end = start, end
    return run


def register(store, **sizes):
    return [store.register(name, Path("adapters") / size) for name, size in sizes.items()]


def check(store, pool, kv=()):
    """The pool agrees with the store, and the store's indexes with all registered adapters."""
    pool.check_integrity([*store.holders(), (PageKind.KV, kv)])
    everything = sorted((name, store.get(name)) for name in store.names())
    assert sorted(store.registered()) == everything
    assert store.cached() == [each for each in everything if store.tier(each[1]) is not Tier.DISK]
    num_pages = sum(adapter.num_pages for _, adapter in everything)
    assert store.num_loadable == (pool.num_unused * len(store) // num_pages if num_pages else pool.num_unused)


def resident(store):
    return {name for name, adapter in store.cached() if store.tier(adapter) is Tier.DEVICE}


def test_registering_loads_nothing(store, pool, backend):
    (a,) = register(store, a="three")
    assert (store.tier(a), a.num_pages, a.references, a.version) == (Tier.DISK, 3, 0, 1)
    assert pool.num_free == 10
    assert backend.placed == []
    assert "a" in store
    assert store.get("a") is a


def test_acquire_loads_once_and_pins(store, pool, backend, use):
    (a,) = register(store, a="three")
    use.start(a)
    use.start(a)
    assert (store.tier(a), a.references, pool.count(PageKind.ADAPTER)) == (Tier.DEVICE, 2, 3)
    assert backend.placed == [("three", a.pages)]
    assert (store.num_loads, store.num_hits, store.num_evictions) == (1, 1, 0)
    check(store, pool)


def test_released_adapter_stays_resident(store, pool, use):
    (a,) = register(store, a="three")
    use(a)
    assert store.tier(a) is Tier.DEVICE
    use(a)
    assert store.num_loads == 1
    assert store.num_idle_pages == 3
    check(store, pool)


def test_least_recently_used_is_evicted_first(store, pool, use):
    """Among adapters of equal cost and as many uses."""
    a, b, c, d = register(store, a="three", b="three", c="three", d="four")
    use(a, b, c)
    use(b, c, a)
    use.start(d)  # 1 page is free, 3 more are needed: b alone has them
    assert resident(store) == {"a", "c", "d"}
    assert store.num_evictions == 1
    use.end(d)
    use(b, d, b)
    assert "c" not in resident(store), "c was used before a"
    check(store, pool)


def test_release_counts_as_use(store, use):
    a, b, c = register(store, a="four", b="four", c="four")
    use.start(a)
    use.start(b)
    use.end(b)
    use.end(a)
    use(c)
    assert resident(store) == {"a", "c"}


def test_pinned_adapters_are_never_evicted(store, pool, use, memory):
    a, b, c = register(store, a="four", b="four", c="three")
    use.start(a)
    use(b)
    use.start(c)
    assert resident(store) == {"a", "c"}
    (d,) = register(store, d="four")
    assert not memory.reclaimer.make_room(4)
    with pytest.raises(OutOfPages, match="'d' needs 4 pages, 3 are free"):
        store.acquire(d)
    assert resident(store) == {"a", "c"}
    assert d.references == 0
    check(store, pool)


def test_adapter_kept_by_name_is_never_evicted(store, pool, memory, use):
    a, b = register(store, a="four", b="two")
    store.pins.add(a)
    store.pins.add(a)
    use(a, b)
    assert a in store.pins
    assert (store.pins.num_pages, store.num_idle_pages) == (4, 2)
    assert memory.reclaimer.reclaim_all() == 2
    assert resident(store) == {"a"}
    store.pins.remove(a)
    store.pins.remove(a)
    assert a not in store.pins
    assert (store.pins.num_pages, a.references, a.requests) == (0, 0, 0)
    assert memory.reclaimer.reclaim_all() == 4
    check(store, pool)


def test_an_adapter_that_has_pages_is_fit_whatever_is_pinned(store, use):
    a, b, c, d = register(store, a="four", b="four", c="two", d="three")
    use(a)
    store.pins.add(b)
    store.pins.add(c)
    assert store.unfit([a, b, d]) == []
    store.pins.add(a)
    assert store.unfit([a, b, c, d]) == [d]


def test_keeping_what_does_not_fit_or_read_holds_nothing(store, pool, backend, use):
    a, b, c = register(store, a="four", b="four", c="three")
    use.start(a)
    use.start(b)
    backend.broken.add("two")
    (d,) = register(store, d="two")
    for adapter, error in ((c, OutOfPages), (d, AdapterFormatError)):
        with pytest.raises(error):
            store.pins.add(adapter)
        assert (adapter.references, adapter.requests, adapter in store.pins) == (0, 0, False)
    check(store, pool)


def sleep(memory):
    memory.store.pins.sleep()
    for adapter in list(memory.store.resident()):
        memory.store.evict(adapter)


def test_a_pin_outlasts_a_sleep(memory, store, pool):
    a, b, c = register(store, a="four", b="two", c="two")
    store.pins.add(a)
    store.pins.add(b)
    sleep(memory)
    store.pins.sleep()
    assert a in store.pins and store.pins.num_pages == 6 and not store.pins.holds_pages_of(a)
    assert (a.references, a.requests, pool.num_free) == (0, 1, 10)
    store.pins.remove(b)
    store.pins.add(c)
    assert (b.requests, c.requests, pool.num_free) == (0, 1, 10)
    assert store.pins.wake() == [] == store.pins.wake()
    assert resident(store) == {"a", "c"} and store.pins.holds_pages_of(c)
    assert (a.references, b.references, c.references) == (1, 0, 1)
    check(store, pool)


@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_a_version_that_leaves_its_name_asleep_leaves_nothing(memory, store, pool, how):
    (a,) = register(store, a="four")
    store.pins.add(a)
    sleep(memory)
    if how == "replaced":
        register(store, a="two")
    else:
        store.unregister("a")
    assert a not in store.pins and (a.requests, a.references) == (0, 0)
    assert store.pins.wake() == [] and not resident(store)
    check(store, pool)


def test_what_finds_no_room_awake_is_no_longer_pinned(memory, store, pool):
    a, b, c = register(store, a="four", b="four", c="three")
    for adapter in (a, b):
        store.pins.add(adapter)
    sleep(memory)
    store.pins.add(c)
    ((failed, error),) = store.pins.wake()
    assert failed is c and isinstance(error, OutOfPages)
    assert c not in store.pins and (c.requests, c.references) == (0, 0)
    assert resident(store) == {"a", "b"}
    check(store, pool)


def test_an_adapter_without_pages_is_pinned_without_a_load(memory, store, pool, backend):
    a, old = register(store, a="two", b="none")
    store.pins.add(old)
    assert store.loads.fetch(old) and old in store.pins and (old.references, old.requests) == (1, 1)
    sleep(memory)
    (new,) = register(store, b="none")
    store.pins.add(new)
    store.pins.add(a)
    assert store.pins.wake() == [] and (new.references, old.references, old.requests) == (1, 0, 0)
    store.prefetch(new)
    assert (store.num_loads, backend.reads) == (1, ["two"]) and resident(store) == {"a"}
    check(store, pool)
    for adapter in (a, new):
        store.pins.remove(adapter)
    assert (new.references, new.requests, store.pins.num_pages) == (0, 0, 0)
    check(store, pool)


def failing_for(store, broken, error):
    """`store.acquire`, which raises the error for one adapter."""

    def acquire(adapter):
        if adapter is broken:
            raise error
        store.acquire(adapter)

    return acquire


@pytest.mark.parametrize("error", [ZeroDivisionError("division by zero"), RuntimeError("no copy"), OSError("gone")])
def test_what_fails_to_load_awake_is_no_longer_pinned_and_the_others_wake(memory, store, pool, monkeypatch, error):
    a, b, c = register(store, a="four", b="two", c="two")
    for adapter in (a, b, c):
        store.pins.add(adapter)
    sleep(memory)
    monkeypatch.setattr(store.pins, "_acquire", failing_for(store, b, error))
    assert store.pins.wake() == [(b, error)]
    assert b not in store.pins and (b.requests, b.references) == (0, 0)
    assert resident(store) == {"a", "c"} and not store.pins.is_asleep
    check(store, pool)


def test_a_wake_that_fails_can_be_tried_again(memory, store, pool, backend, monkeypatch):
    a, b = register(store, a="four", b="two")
    for adapter in (a, b):
        store.pins.add(adapter)
    sleep(memory)
    with monkeypatch.context() as patch:
        patch.setattr(store.pins, "_acquire", failing_for(store, b, MemoryError()))
        with pytest.raises(MemoryError):
            store.pins.wake()
    assert store.pins.is_asleep and (a.references, a.requests, b.references, b.requests) == (0, 1, 0, 1)
    assert store.pins.wake() == [] and (a.references, b.references) == (1, 1)
    check(store, pool)


@pytest.mark.parametrize("how", ["reload", "unregister"])
def test_a_pin_ends_with_its_version(store, pool, how):
    (old,) = register(store, a="four")
    store.pins.add(old)
    if how == "reload":
        (new,) = register(store, a="two")
        assert new not in store.pins
    else:
        store.unregister("a")
    assert (old.pages, old.references, store.pins.num_pages) == ([], 0, 0)
    assert pool.num_free == 10
    check(store, pool)


@pytest.mark.parametrize("how", ["reload", "unregister"])
def test_a_pin_that_ends_leaves_the_version_to_its_requests(store, pool, use, how):
    (old,) = register(store, a="four")
    store.pins.add(old)
    use.start(old)
    if how == "reload":
        register(store, a="two")
    else:
        store.unregister("a")
    assert (len(old.pages), old.references) == (4, 1)
    check(store, pool)
    use.end(old)
    assert pool.num_free == 10


def test_room_for_an_adapter_is_all_or_nothing(store, pool, use):
    a, b, c = register(store, a="three", b="two", c="four")
    use(a)
    use.start(b)
    kv = pool.allocate(5, PageKind.KV)
    with pytest.raises(OutOfPages):
        use.start(c)
    assert resident(store) == {"a", "b"}
    check(store, pool, kv)


def test_evicted_adapter_comes_back_in_a_new_page_list(store, backend, use):
    """Views of an adapter's rows are kept per page list, so the list's identity changes with its pages."""
    (a,) = register(store, a="two")
    use(a)
    before = a.pages
    store.evict(a)
    use(a)
    assert a.pages is not before
    assert len(backend.placed) == 2
    assert backend.reads == ["two"], "its host image was not used"


def test_broken_weights_hold_nothing(store, pool, backend, use):
    a, b = register(store, a="two", b="three")
    use(b)
    backend.broken.add("two")
    with pytest.raises(AdapterFormatError, match="cannot be read"):
        store.acquire(a)
    assert (a.references, a.pages) == (0, [])
    assert resident(store) == {"b"}, "an adapter was evicted for one that cannot be read"
    backend.broken.clear()
    store.acquire(a)
    assert a.references == 1
    check(store, pool)


def test_failing_copy_holds_nothing(store, pool, backend):
    (a,) = register(store, a="two")
    backend.stuck.add("two")
    with pytest.raises(RuntimeError, match="no copy"):
        store.acquire(a)
    assert (a.references, a.pages, pool.num_free) == (0, [], 10)
    check(store, pool)


# -- tiers


@pytest.fixture
def slow(pool, backend):
    """A memory whose reads take until the test ends them, with room for 4 pages on the host."""
    memory = Memory(pool, backend, SlowReads(), host_bytes=4 * PAGE_BYTES)
    memory.reads = memory.images.reads
    return memory


def test_tiers_from_disk_to_device_and_back(slow):
    store = slow.store
    (a,) = register(store, a="two")
    assert store.tier(a) is Tier.DISK
    store.loads.ahead([a])
    store.loads.ahead([a])
    assert store.tier(a) is Tier.LOADING
    assert len(slow.reads.pending) == 1, "read twice"
    slow.reads.finish()
    assert store.tier(a) is Tier.HOST
    store.acquire(a)
    assert store.tier(a) is Tier.DEVICE
    store.release(a)
    store.evict(a)
    assert store.tier(a) is Tier.HOST
    slow.images.drop(a)
    assert store.tier(a) is Tier.DISK


def test_reads_ahead_in_order_and_no_more_than_host_memory_takes(slow):
    store = slow.store
    a, b, c, d = register(store, a="two", b="one", c="two", d="one")
    store.loads.ahead([a, b, c, d])
    assert [store.tier(x) for x in (a, b, c, d)] == [Tier.LOADING, Tier.LOADING, Tier.DISK, Tier.DISK]


def test_reads_ahead_counts_an_adapter_once(slow):
    """Waiting requests of one adapter take its room on the host once."""
    store = slow.store
    a, b = register(store, a="two", b="two")
    store.loads.ahead([a, a, a, b])
    assert store.tier(b) is Tier.LOADING


def test_the_first_is_read_ahead_whatever_its_size(pool, backend):
    memory = Memory(pool, backend, SlowReads(), host_bytes=0)
    a, b = register(memory.store, a="four", b="one")
    memory.store.loads.ahead([a, b])
    assert [memory.store.tier(x) for x in (a, b)] == [Tier.LOADING, Tier.DISK]


def test_resident_adapters_are_not_read_ahead(store, backend, use):
    (a,) = register(store, a="two")
    use(a)
    backend.reads.clear()
    store.loads.ahead([a])
    assert backend.reads == []


def test_failed_read_is_told_to_who_loads_and_then_forgotten(slow, backend, pool):
    store = slow.store
    (a,) = register(store, a="two")
    backend.broken.add("two")
    store.loads.ahead([a])
    slow.reads.finish()
    assert store.tier(a) is Tier.FAILED
    with pytest.raises(AdapterFormatError, match="cannot be read"):
        store.acquire(a)
    assert store.tier(a) is Tier.DISK
    check(store, pool)


def test_read_of_a_removed_version_is_cancelled(slow):
    (a,) = register(slow.store, a="two")
    slow.store.loads.ahead([a])
    slow.store.unregister("a")
    future, _ = slow.reads.pending[0]
    assert future.cancelled()
    assert slow.images.num_bytes == 0
    slow.reads.finish()


# -- loads that are followed while the file is read


@pytest.fixture
def streaming(slow):
    """An adapter of two pages with a running request, whose bytes are still being read."""
    (a,) = register(slow.store, a="two")
    slow.store.hold(a)
    slow.store.loads.ahead([a])
    slow.store.acquire(a)
    return a


def test_an_adapter_is_taken_while_it_is_read(slow, streaming, backend, pool):
    store = slow.store
    assert len(streaming.pages) == 2
    assert (store.tier(streaming), bool(store.loads.under_way), backend.placed) == (Tier.LOADING, True, [])
    assert store.poll() == []
    slow.reads.finish()
    assert backend.placed == [("two", streaming.pages)]
    assert store.poll() == []
    assert (store.tier(streaming), bool(store.loads.under_way)) == (Tier.DEVICE, False)
    assert (store.num_loads, store.num_streamed) == (1, 1)
    check(store, pool)


def test_what_is_whole_is_not_streamed(slow):
    (a,) = register(slow.store, a="two")
    slow.store.loads.ahead([a])
    slow.reads.finish()
    slow.store.acquire(a)
    assert slow.store.tier(a) is Tier.DEVICE
    assert slow.store.num_streamed == 0


def test_an_adapter_on_its_way_keeps_its_pages(slow, streaming, pool):
    slow.store.release(streaming)
    assert slow.store.num_idle_pages == 0
    assert not slow.reclaimer.make_room(9)
    slow.reads.finish()
    slow.store.poll()
    assert slow.store.num_idle_pages == 2
    assert slow.reclaimer.make_room(10)
    check(slow.store, pool)


def test_a_read_that_fails_on_the_way_is_told_once_with_its_cause(slow, streaming, backend, pool):
    backend.broken.add("two")
    slow.reads.finish()
    ((adapter, error),) = slow.store.poll()
    assert adapter is streaming
    assert "cannot be read" in str(error)
    slow.store.release(streaming)
    slow.store.evict(streaming)
    assert slow.store.poll() == []
    assert (slow.store.tier(streaming), pool.num_free) == (Tier.FAILED, 10)
    slow.store.images.watch()
    assert "cannot be read" in str(slow.store.images.error(streaming)), "others may wait for it"
    slow.store.images.forget_failures()
    assert slow.store.tier(streaming) is Tier.DISK
    check(slow.store, pool)


@pytest.mark.parametrize("busy", [False, True])
def test_pages_of_an_adapter_that_leaves_on_its_way_go_back_when_nothing_writes_to_them(
    slow, streaming, backend, pool, busy
):
    transfer = streaming.transfer
    transfer.busy = busy
    slow.store.release(streaming)
    slow.store.unregister("a")
    slow.store.let_go(streaming)
    assert transfer.is_cancelled
    assert (pool.num_free, bool(slow.store.loads.under_way)) == ((8, True) if busy else (10, False))
    check(slow.store, pool)
    transfer.busy = False
    slow.store.poll()
    assert (pool.num_free, bool(slow.store.loads.under_way)) == (10, False)
    assert backend.placed == []
    check(slow.store, pool)


def test_fetching_tells_when_all_of_an_adapter_is_in_memory(slow, backend):
    store = slow.store
    a, b = register(store, a="two", b="one")
    backend.broken.add("one")
    assert not store.loads.fetch(a)
    assert not store.loads.fetch(b)
    slow.reads.finish()
    slow.reads.finish()
    assert store.loads.fetch(a)
    with pytest.raises(AdapterFormatError, match="cannot be read"):
        store.loads.fetch(b)
    assert store.tier(b) is Tier.DISK, "it is tried again"
    store.acquire(a)
    assert store.loads.fetch(a)
    assert backend.reads == ["two", "one"]


@pytest.mark.parametrize("broken", [False, True])
def test_fetching_what_is_on_its_way_into_pages(slow, streaming, backend, broken):
    assert not slow.store.loads.fetch(streaming)
    backend.broken |= {"two"} if broken else set()
    slow.reads.finish()
    if broken:
        with pytest.raises(AdapterFormatError, match="cannot be read"):
            slow.store.loads.fetch(streaming)
    else:
        assert slow.store.loads.fetch(streaming)


def test_a_pin_is_lost_with_bytes_that_never_come(slow, streaming, backend, pool):
    streaming.transfer.has_failed = lambda: True
    slow.reads.finish()
    streaming.transfer.is_done = lambda: False
    slow.store.pins.add(streaming)
    ((adapter, error),) = slow.store.poll()
    assert adapter is streaming
    assert "ended too early" in str(error)
    assert streaming not in slow.store.pins


def test_replaced_version_that_is_held_is_read_at_once(slow):
    """Its directory may be about to change."""
    (old,) = register(slow.store, a="two")
    slow.store.hold(old)
    register(slow.store, a="one")
    assert slow.store.tier(old) is Tier.LOADING


@pytest.fixture
def copied(slow, streaming):
    """An adapter whose pages are filled, as is still to be noticed; nobody held it, so its image made room."""
    slow.reads.finish()
    slow.store.release(streaming)
    slow.store.let_go(streaming)
    slow.store.images.drop(streaming)
    assert streaming.transfer is not None
    return streaming


def test_replaced_version_that_is_being_copied_is_not_read_again(slow, copied):
    """Its directory holds something else by now, so that the read would fail, and its requests with it."""
    store = slow.store
    store.hold(copied)
    register(store, a="two")
    assert not slow.reads.pending
    assert store.images.is_ready(copied), "a request holds it, so it has an image"
    store.poll()
    assert store.tier(copied) is Tier.DEVICE


def test_pages_whose_bytes_have_all_been_read_are_not_taken_back(slow, copied):
    assert not slow.store.give_up_loads()
    slow.store.poll()
    assert slow.store.tier(copied) is Tier.DEVICE


def test_weights_that_were_checked_are_not_read_again(store, backend, pool, use):
    (old,) = register(store, a="two")
    use(old)
    image, manifest = HostImage(), backend.inspect(Path("three"))
    backend.read(manifest, backend.layout(manifest), image)
    new = store.register("a", manifest, image)
    assert store.tier(new) is Tier.HOST
    use(new)
    assert backend.reads == ["two", "three"]
    check(store, pool)


def test_measured_costs_follow_the_clock(pool, backend):
    ticks = iter(range(0, 1000, 8))
    costs = RestoreCosts(disk_adapter_page=0.0, host_adapter_page=0.0)
    images = HostImages(1000, InlineReads())
    store = AdapterStore(pool, backend, images, EvictionOrder(), costs, PAGE_BYTES, clock=lambda: next(ticks))
    (a,) = register(store, a="four")
    store.acquire(a)
    assert costs.disk_adapter_page == pytest.approx(0.2 * 8 / 4)
    assert costs.host_adapter_page == pytest.approx(0.2 * 8 / 4)


# -- versions


def test_reload_of_an_idle_adapter_frees_the_old_version(store, pool, use):
    (old,) = register(store, a="four")
    use(old)
    (new,) = register(store, a="two")
    assert new.version > old.version
    assert store.get("a") is new
    assert old.pages == []
    assert pool.num_free == 10
    check(store, pool)


def test_reload_keeps_the_old_version_while_it_is_used(store, pool, use):
    (old,) = register(store, a="four")
    use.start(old)
    use.start(old)
    (new,) = register(store, a="two")
    use.start(new)
    assert pool.count(PageKind.ADAPTER) == 6
    use.end(old)
    assert len(old.pages) == 4
    assert store.num_idle_pages == 0
    use.end(old)
    assert old.pages == []
    assert pool.count(PageKind.ADAPTER) == 2
    check(store, pool)


def test_retired_version_can_be_taken_again_by_who_holds_it(store, pool, memory):
    """A preempted request lets go of a replaced version's pages and loads it again later."""
    (old,) = register(store, a="four")
    store.hold(old)
    store.acquire(old)
    register(store, a="two")
    store.release(old)
    assert store.num_idle_pages == 4
    assert memory.reclaimer.make_room(10)
    assert old.pages == []
    store.hold(old)
    store.acquire(old)
    store.acquire(old)
    assert len(old.pages) == 4
    check(store, pool)
    for _ in range(2):
        store.release(old)
        store.let_go(old)
    assert pool.num_free == 10
    check(store, pool)


def test_gone_versions_are_told(store, use):
    """Things that are kept by version, such as cached prefixes, are dropped then and not before."""
    gone = []
    store.on_leaving = lambda adapter, is_gone: gone.append(adapter.version) if is_gone else None
    a, b = register(store, a="four", b="one")
    store.hold(a)
    register(store, a="two")
    store.unregister("b")
    assert gone == [b.version]
    store.let_go(a)
    assert gone == [b.version, a.version]


def test_unregister(store, pool, use):
    a, b = register(store, a="four", b="two")
    use(a)
    use.start(b)
    store.unregister("a")
    store.unregister("b")
    assert store.names() == store.cached() == []
    assert a.pages == []
    assert len(b.pages) == 2
    check(store, pool)
    use.end(b)
    assert pool.num_free == 10


def test_several_retired_versions_of_one_name(store, pool, use):
    versions = []
    for size in ("one", "two", "three"):
        versions += register(store, a=size)
        use.start(versions[-1])
    assert pool.count(PageKind.ADAPTER) == 6
    store.unregister("a")
    for version in (versions[1], versions[2], versions[0]):
        use.end(version)
        assert version.pages == []
        check(store, pool)
    assert pool.num_free == 10


def test_failed_reload_keeps_the_current_version(store):
    (a,) = register(store, a="two")
    with pytest.raises(AdapterFormatError):
        store.register("a", Path("nowhere"))
    with pytest.raises(AdapterFormatError, match="needs 100 pages of the pool, which has 10"):
        store.register("a", Path("huge"))
    assert store.get("a") is a


@pytest.mark.parametrize("method", ["get", "unregister"])
def test_unknown_names_are_named(store, method):
    with pytest.raises(UnknownAdapter) as caught:
        getattr(store, method)("nobody")
    assert str(caught.value) == "adapter 'nobody' is not registered"


def test_names_are_sorted_and_a_kept_version_goes_by_its_own(store, pool):
    b, a = register(store, b="two", a="three")
    store.acquire(a)
    newer = store.register("a", Path("adapters/two"), keep=2)
    assert store.names() == ["a", "a@1", "b"]
    assert sorted(store.registered()) == [("a", newer), ("a@1", a), ("b", b)]
    assert store.cached() == [("a@1", a)]
    check(store, pool)


def test_an_adapter_is_found_by_its_content_as_long_as_it_is_registered(store, pool):
    first, second = register(store, a="three", b="three")
    known = dataclasses.replace(first.manifest, content_hash="c" * 64)
    assert store.find(None) is store.find(known.content_hash) is None
    store.note(first, known)
    store.note(second, known)
    assert store.find(known.content_hash) is first
    store.hold(first)
    store.unregister("a")
    assert store.find(known.content_hash) is second
    register(store, b="two")
    assert store.find(known.content_hash) is None
    store.let_go(first)
    check(store, pool)


# -- versions that requests hold


def test_bytes_of_a_held_version_are_saved_before_its_pages_are_given_up(memory, store, backend, pool):
    """Its directory was overwritten in place: it could not be read again."""
    (old,) = register(store, a="four")
    store.hold(old)
    store.acquire(old)
    memory.images.drop(old)
    register(store, a="two")
    backend.broken.add("four")
    store.release(old)
    assert memory.reclaimer.make_room(10)
    assert (old.pages, backend.saved) == ([], ["four"])
    assert store.tier(old) is Tier.HOST
    store.acquire(old)
    assert backend.placed[-1] == ("four", old.pages)
    store.release(old)
    store.let_go(old)
    assert memory.images.num_bytes == 0
    check(store, pool)


def test_nothing_is_saved_that_nobody_holds_or_that_is_on_the_host(memory, store, backend, use):
    a, b = register(store, a="four", b="two")
    use(a)
    memory.images.drop(a)
    store.hold(b)
    store.acquire(b)
    store.release(b)
    assert memory.reclaimer.make_room(10)
    assert backend.saved == []


def test_a_version_that_cannot_be_saved_gives_up_its_pages_all_the_same(memory, store, backend, pool):
    (a,) = register(store, a="four")
    store.hold(a)
    store.acquire(a)
    memory.images.drop(a)
    store.release(a)
    backend.save = lambda layout, pages: (_ for _ in ()).throw(MemoryError("no memory"))
    assert memory.reclaimer.make_room(10)
    assert store.tier(a) is Tier.DISK
    check(store, pool)


def test_a_device_that_is_lost_while_it_saves_is_everybodys(memory, store, backend):
    (a,) = register(store, a="four")
    store.hold(a)
    store.acquire(a)
    memory.images.drop(a)
    store.release(a)
    backend.save = lambda layout, pages: (_ for _ in ()).throw(ExecutorLost("an illegal address"))
    with pytest.raises(ExecutorLost, match="illegal address"):
        memory.reclaimer.make_room(10)


@pytest.mark.parametrize("told", ["asked", "read"])
def test_a_device_that_is_lost_while_it_copies_is_everybodys(slow, backend, told):
    """The transfer tells it when it is asked how far it is, or the reading thread when it issues a copy: both count."""
    store = slow.store
    (a,) = register(store, a="four")
    store.hold(a)
    store.acquire(a)
    if told == "read":
        store.loads.under_way[a.transfer].image.fail(ExecutorLost("an ECC error"))
    else:
        a.transfer.is_done = lambda: (_ for _ in ()).throw(ExecutorLost("an ECC error"))
    with pytest.raises(ExecutorLost, match="ECC"):
        store.poll()


def test_the_host_image_of_a_held_version_keeps_its_room_and_others_wait(slow):
    store = slow.store
    a, b, c = register(store, a="four", b="two", c="two")
    store.hold(a)
    store.loads.ahead([a])
    slow.reads.finish()
    store.loads.ahead([b, c])
    assert [store.tier(x) for x in (a, b, c)] == [Tier.HOST, Tier.LOADING, Tier.DISK], "one always goes on"
    store.let_go(a)
    for wanted in (b, c):
        store.hold(wanted)
    slow.reads.finish()
    store.loads.ahead([b, c])
    assert [store.tier(x) for x in (a, b, c)] == [Tier.DISK, Tier.HOST, Tier.LOADING]


def test_a_request_that_comes_after_a_failed_read_has_it_tried_again(slow, backend):
    (a,) = register(slow.store, a="two")
    backend.broken.add("two")
    slow.store.loads.ahead([a])
    slow.reads.finish()
    assert slow.store.tier(a) is Tier.FAILED
    backend.broken.clear()
    slow.store.hold(a)
    assert slow.store.tier(a) is Tier.DISK


# -- expected times of reads


@pytest.mark.parametrize(
    ("quiet", "layer_seconds", "left"),
    [
        (0.0, 0.0, 3 * 0.02),
        (0.07, 0.0, 3 * 0.02),
        (0.09, 0.0, math.inf),
        (0.0, 0.5, 3 * 0.5),
        (1.5, 0.5, 3 * 0.5),
        (1.6, 0.5, math.inf),
    ],
)
def test_the_rest_of_a_read_is_expected_by_what_reads_take_and_by_its_own_pace(
    pool, backend, monkeypatch, quiet, layer_seconds, left
):
    layout = AdapterLayout((), num_elems=8, num_pages=8, num_layers=4)
    monkeypatch.setattr(backend, "layout", lambda manifest: layout)
    memory = Memory(pool, backend, SlowReads())
    memory.costs.disk_adapter_page = 0.01
    adapter = memory.store.register("a", Path("one"))
    memory.store.loads.request(adapter)
    monkeypatch.setattr(memory.images, "pace", lambda adapter: (quiet, layer_seconds))
    assert memory.store.loads.seconds_left(adapter, patience=0.02) == math.inf, "nobody knows before its first layer"
    memory.images.peek(adapter).publish(1)
    assert memory.store.loads.seconds_left(adapter, patience=0.02) == pytest.approx(left)


def test_how_many_more_fit_counts_free_pages_and_cached_kv(store, pool, use):
    assert store.num_loadable == 10  # nothing is registered: a page each
    a, _ = register(store, a="four", b="two")
    assert store.num_loadable == 3  # of 3 pages on average
    use(a)  # idle, but resident: it would have to be evicted
    assert store.num_loadable == 2
    kv = pool.allocate(3, PageKind.KV)
    assert store.num_loadable == 1
    pool.keep(kv[0])
    pool.release(kv)
    assert pool.count(PageKind.CACHED) == 1 and store.num_loadable == 2


@pytest.mark.parametrize("is_slow", [False, True])
def test_no_step_waits_for_bytes_that_the_host_copies(store, backend, use, monkeypatch, is_slow):
    """They come from ordinary memory, as late as those of a disk: steps wait only for copies that the device makes."""
    monkeypatch.setattr(HostImage, "is_slow", property(lambda image: is_slow))
    place = backend.load

    def later(*args):
        transfer = place(*args)
        assert transfer is None
        return Unfinished()

    monkeypatch.setattr(backend, "load", later)
    (a,) = register(store, a="three")
    use.start(a)
    is_slow_now, is_slow = is_slow, False
    assert store.loads.is_reading(a) == is_slow_now, "wherever the image is moved for the next time"
    assert store.loads.seconds_left(a, 0.02) == (math.inf if is_slow_now else 0)


class Unfinished:
    """A transfer whose copies are under way."""

    def is_done(self):
        return False

    def has_failed(self):
        return False
