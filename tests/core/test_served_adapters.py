"""Adapters that are pinned: nothing is pinned before all of it has been read, and its copy is seen to end."""

from __future__ import annotations

from unittest.mock import Mock, patch

import pytest

from chorus.memory.adapters.adapter import Tier
from chorus.memory.files.error import PagesInUse

from ..simulation.checked_engine import CheckedEngine
from .scheduling.test_scheduling import HeldReads


def test_a_pin_waits_for_the_read_of_an_image_that_made_room_for_what_the_pin_evicts():
    """Host memory has room for one image: the evicted adapter's, which a waiting request needs, replaces its own."""
    reads = HeldReads()
    checked = CheckedEngine(
        reads, "ab", num_pages=1 + 7, host_cache_bytes=300, preemption="recompute", max_load_stall_seconds=0
    )
    used = checked.add("used", "a", prompt=[5])
    checked.step()
    reads.finish()
    checked.add("base", prompt=[6] * 14, max_tokens=2)
    checked.step()
    adapters, store = checked.engine.adapters, checked.engine.store
    assert not adapters.pin("b"), "it is being read"
    reads.finish()
    checked.engine.scheduler.lifecycle.preempt(used)
    assert store.images.is_ready(store.get("b"))
    assert not adapters.pin("b"), "it is being read again"
    assert store.get("b") not in store.pins
    reads.finish()
    assert adapters.pin("b")
    assert store.get("b").transfer is None


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "unpinned"])
def test_an_engine_with_nothing_else_to_do_sees_a_pinned_adapter_s_copy_end(is_kept):
    """It stayed "loading" until the next request came, and the pages of a cancelled copy stayed taken."""
    checked = CheckedEngine(adapters="a")
    backend, store = checked.executor.adapters, checked.engine.store
    inner, looks = backend.load, iter([False] * 3)

    def place(image, layout, pages):
        assert inner(image, layout, pages) is None
        ended = lambda: next(looks, True)  # noqa: E731
        return Mock(is_done=ended, is_quiet=ended, has_failed=lambda: False)

    with patch.object(backend, "load", place):
        assert checked.engine.adapters.pin("a")
    adapter = store.get("a")
    assert store.tier(adapter) is Tier.LOADING
    if not is_kept:
        checked.engine.adapters.unpin("a")
        store.evict(adapter)
    assert checked.engine.has_work()
    checked.drain(limit=10)
    assert store.tier(adapter) is (Tier.DEVICE if is_kept else Tier.HOST)
    assert checked.engine.pool.num_free == checked.engine.pool.num_usable - len(adapter.pages)


def test_a_pin_without_room_at_the_moment_says_so_and_succeeds_later():
    """It was refused like one that would never fit: "would take 2 of 7 pages; unpin others", with nothing pinned."""
    checked = CheckedEngine(adapters="a", num_pages=1 + 7, preemption="recompute")
    adapters, adapter = checked.engine.adapters, checked.engine.store.get("a")
    assert 2 * adapter.num_pages <= checked.engine.pool.num_usable
    checked.add("base", prompt=[6] * 24, max_tokens=2)
    checked.step()
    with pytest.raises(PagesInUse, match="requests in progress") as refused:
        adapters.pin("a")
    assert refused.value.failure.may_pass and adapter not in checked.engine.store.pins
    checked.drain()
    assert adapters.pin("a")
