"""Which adapters are resident: least recently used first, never one in use, and all or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from chorus.memory.adapter_format import AdapterFormatError, AdapterManifest
from chorus.memory.adapter_store import AdapterStore, Tier, UnknownAdapter
from chorus.memory.layout import MODULES, SlabLayout
from chorus.memory.pages import OutOfPages, PageKind, PagePool


class FakeBackend:
    """A path is named after its page count: `four` has 4 pages. Names in `broken` fail to read, in `stuck` to place."""

    SIZES = {"one": 1, "two": 2, "three": 3, "four": 4, "huge": 100}

    def __init__(self):
        self.broken: set[str] = set()
        self.stuck: set[str] = set()
        self.placed: list[tuple[str, list[int]]] = []

    def inspect(self, path):
        if path.name not in self.SIZES:
            raise AdapterFormatError(f"{path}: no such directory")
        return AdapterManifest(path, self.SIZES[path.name], 1.0, ("q_proj",), {})

    def slabs(self, manifest):
        return SlabLayout((0,) * len(MODULES), (0,) * len(MODULES), slab_elems=8, page_elems=8)

    def num_slabs(self, manifest):
        return manifest.rank

    def read(self, manifest, slabs):
        if manifest.path.name in self.broken:
            raise AdapterFormatError(f"{manifest.path}: cannot be read")
        return manifest.path.name

    def place(self, image, pages):
        if image in self.stuck:
            raise RuntimeError("no copy")
        self.placed.append((image, list(pages)))


@pytest.fixture
def backend():
    return FakeBackend()


@pytest.fixture
def pool():
    return PagePool(11)  # 10 usable


@pytest.fixture
def store(pool, backend):
    return AdapterStore(pool, backend)


def register(store, **sizes):
    return [store.register(name, Path("adapters") / size) for name, size in sizes.items()]


def use(store, *adapters):
    """Load and let go, in this order."""
    for adapter in adapters:
        store.acquire(adapter)
        store.release(adapter)


def check(store, pool, kv=()):
    pool.check_integrity([*store.holders(), (PageKind.KV, kv)])


def resident(store):
    return {info.name for info in store.describe() if info.tier == Tier.DEVICE.value}


def test_registering_loads_nothing(store, pool, backend):
    (a,) = register(store, a="three")
    assert (a.tier, a.num_pages, a.references, a.version) == (Tier.DISK, 3, 0, 1)
    assert pool.num_free == 10
    assert backend.placed == []
    assert "a" in store
    assert store.get("a") is a


def test_acquire_loads_once_and_pins(store, pool, backend):
    (a,) = register(store, a="three")
    store.acquire(a)
    store.acquire(a)
    assert (a.tier, a.references, pool.count(PageKind.ADAPTER)) == (Tier.DEVICE, 2, 3)
    assert backend.placed == [("three", a.pages)]
    assert (store.num_loads, store.num_evictions) == (1, 0)
    check(store, pool)


def test_released_adapter_stays_resident(store, pool):
    (a,) = register(store, a="three")
    use(store, a)
    assert a.tier is Tier.DEVICE
    use(store, a)
    assert store.num_loads == 1
    assert store.reclaimable_pages() == 3
    check(store, pool)


def test_least_recently_used_is_evicted_first(store, pool):
    a, b, c, d = register(store, a="three", b="three", c="three", d="four")
    use(store, a, b, c, a)
    store.acquire(d)  # 1 page is free, 3 more are needed: b alone has them
    assert resident(store) == {"a", "c", "d"}
    assert store.num_evictions == 1
    store.release(d)
    use(store, b)
    assert resident(store) == {"a", "b", "d"}, "c was used before a"
    check(store, pool)


def test_release_counts_as_use(store):
    a, b, c = register(store, a="four", b="four", c="four")
    store.acquire(a)
    store.acquire(b)
    store.release(b)
    store.release(a)
    use(store, c)
    assert resident(store) == {"a", "c"}


def test_pinned_adapters_are_never_evicted(store, pool):
    a, b, c = register(store, a="four", b="four", c="three")
    store.acquire(a)
    use(store, b)
    store.acquire(c)
    assert resident(store) == {"a", "c"}
    (d,) = register(store, d="four")
    with pytest.raises(OutOfPages, match="'d' needs 4 pages, 3 can be had"):
        store.acquire(d)
    assert resident(store) == {"a", "c"}
    assert d.references == 0
    check(store, pool)


def test_make_room_is_all_or_nothing(store, pool):
    a, b = register(store, a="three", b="three")
    use(store, a, b)
    kv = pool.allocate(4, PageKind.KV)
    assert store.make_room(0)
    assert not store.make_room(7)
    assert resident(store) == {"a", "b"}, "adapters were given up for nothing"
    assert store.make_room(2)
    assert resident(store) == {"b"}
    assert store.make_room(3)
    assert resident(store) == {"b"}, "more was evicted than was needed"
    assert store.make_room(6)
    assert resident(store) == set()
    check(store, pool, kv)


def test_room_for_an_adapter_is_all_or_nothing(store, pool):
    a, b, c = register(store, a="three", b="two", c="four")
    use(store, a)
    store.acquire(b)
    kv = pool.allocate(5, PageKind.KV)
    with pytest.raises(OutOfPages):
        store.acquire(c)
    assert resident(store) == {"a", "b"}
    check(store, pool, kv)


def test_evict_idle(store, pool):
    a, b, c = register(store, a="two", b="two", c="two")
    use(store, a, b)
    store.acquire(c)
    assert store.evict_idle() == 2
    assert resident(store) == {"c"}
    assert store.evict_idle() == 0
    assert pool.num_free == 8
    check(store, pool)


def test_evicted_adapter_comes_back_in_a_new_page_list(store, backend):
    """Views of an adapter's rows are kept per page list, so the list's identity changes with its pages."""
    (a,) = register(store, a="two")
    use(store, a)
    before = a.pages
    store.evict_idle()
    use(store, a)
    assert a.pages is not before
    assert len(backend.placed) == 2


def test_broken_weights_hold_nothing(store, pool, backend):
    a, b = register(store, a="two", b="three")
    use(store, b)
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


# -- versions


def test_reload_of_an_idle_adapter_frees_the_old_version(store, pool):
    (old,) = register(store, a="four")
    use(store, old)
    (new,) = register(store, a="two")
    assert new.version > old.version
    assert store.get("a") is new
    assert old.pages == []
    assert pool.num_free == 10
    check(store, pool)


def test_reload_keeps_the_old_version_while_it_is_used(store, pool):
    (old,) = register(store, a="four")
    store.acquire(old)
    store.acquire(old)
    (new,) = register(store, a="two")
    store.acquire(new)
    assert pool.count(PageKind.ADAPTER) == 6
    store.release(old)
    assert len(old.pages) == 4
    assert store.reclaimable_pages() == 0
    store.release(old)
    assert old.pages == []
    assert pool.count(PageKind.ADAPTER) == 2
    check(store, pool)


def test_retired_version_can_be_taken_again_by_who_holds_it(store, pool):
    """A preempted request lets go of a replaced version and loads it again later."""
    (old,) = register(store, a="four")
    store.acquire(old)
    register(store, a="two")
    store.release(old)
    assert old.pages == []
    store.acquire(old)
    store.acquire(old)
    assert len(old.pages) == 4
    check(store, pool)
    store.release(old)
    store.release(old)
    assert pool.num_free == 10
    check(store, pool)


def test_unregister(store, pool):
    a, b = register(store, a="four", b="two")
    use(store, a)
    store.acquire(b)
    store.unregister("a")
    store.unregister("b")
    assert store.names() == store.describe() == []
    assert a.pages == []
    assert len(b.pages) == 2
    check(store, pool)
    store.release(b)
    assert pool.num_free == 10


def test_several_retired_versions_of_one_name(store, pool):
    versions = []
    for size in ("one", "two", "three"):
        versions += register(store, a=size)
        store.acquire(versions[-1])
    assert pool.count(PageKind.ADAPTER) == 6
    store.unregister("a")
    for version in (versions[1], versions[2], versions[0]):
        store.release(version)
        assert version.pages == []
        check(store, pool)
    assert pool.num_free == 10


def test_failed_reload_keeps_the_current_version(store):
    (a,) = register(store, a="two")
    with pytest.raises(AdapterFormatError):
        store.register("a", Path("nowhere"))
    with pytest.raises(AdapterFormatError, match="needs 100 pages of the arena, which has 10"):
        store.register("a", Path("huge"))
    assert store.get("a") is a


@pytest.mark.parametrize("method", ["get", "unregister"])
def test_unknown_names_are_named(store, method):
    with pytest.raises(UnknownAdapter) as caught:
        getattr(store, method)("nobody")
    assert str(caught.value) == "adapter 'nobody' is not registered"


def test_describe_is_sorted_and_complete(store):
    register(store, b="two", a="three")
    store.acquire(store.get("a"))
    a, b = store.describe()
    assert (a.name, a.rank, a.tier, a.references, a.num_pages) == ("a", 3, "device", 1, 3)
    assert (b.name, b.rank, b.tier, b.references, b.num_pages) == ("b", 2, "disk", 0, 0)
    assert a.target_modules == ("q_proj",)
    assert b.path == Path("adapters/two")
    assert store.names() == ["a", "b"]
