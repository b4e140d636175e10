"""Adapters that are pinned: nothing is pinned before all of it has been read."""

from __future__ import annotations

from ..world.house import House
from .scheduling.test_scheduling import HeldReads


def test_a_pin_waits_for_the_read_of_an_image_that_made_room_for_what_the_pin_evicts():
    """Host memory has room for one image: the evicted adapter's, which a waiting request needs, replaces its own."""
    reads = HeldReads()
    house = House(reads, "ab", num_pages=1 + 7, host_cache_bytes=300, preemption="recompute", max_load_stall_seconds=0)
    used = house.add("used", "a", prompt=[5])
    house.step()
    reads.finish()
    house.add("base", prompt=[6] * 14, max_tokens=2)
    house.step()
    adapters, store = house.engine.adapters, house.engine.store
    assert not adapters.pin("b"), "it is being read"
    reads.finish()
    house.engine.scheduler.lifecycle.preempt(used)
    assert store.images.is_ready(store.get("b"))
    assert not adapters.pin("b"), "it is being read again"
    assert not store.is_pinned(store.get("b"))
    reads.finish()
    assert adapters.pin("b")
    assert store.get("b").transfer is None
