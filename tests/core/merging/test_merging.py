"""Merging without a model: its stalls."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from chorus.core.merging.merging import RETRY_SECONDS, Merging
from chorus.core.requests.types import CannotMerge
from chorus.memory.adapters.reclaimer import Reclaimer
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.pages.eviction import EvictionOrder, RestoreCosts
from chorus.memory.pages.pool import PageKind, PagePool
from chorus.memory.pages.prefix import PrefixCache
from chorus.memory.pages.shadow import ShadowPages
from chorus.memory.transfers.transfer import ExecutorLost


class Clock:
    now = 5.0

    def __call__(self):
        return self.now


class Weights:
    """Shadow weights of runs of two pages each, which are made at once."""

    def __init__(self, num_runs):
        self.num_runs = num_runs
        self.num_calls = 0

    def sizes(self, adapter):
        return [2] * self.num_runs

    def wished_runs(self, adapter):
        return None

    def begin(self, adapter, runs):
        self.num_calls = 0

    def advance(self, max_seconds):
        self.num_calls += 1
        return True

    def drop(self):
        pass


def merging_of(num_runs, num_cached, clock):
    """Merging of an adapter into an arena of which the prefix cache has so many pages."""
    pool, order = PagePool(max(2, 1 + 2 * num_runs)), EvictionOrder()
    prefix = PrefixCache(pool, order, RestoreCosts(), 4)
    for page in pool.allocate(num_cached, PageKind.KV):
        prefix.insert(0, None, [page], [page])
        prefix.release([page])
    store = SimpleNamespace(hold=lambda adapter: None, let_go=lambda adapter: None, idle=lambda: ())
    reclaimer = Reclaimer(pool, order, store, prefix, ShadowPages(pool, order))
    adapter = type(
        "Resident", (), {"name": "a", "pages": (7,), "transfer": None, "manifest": AdapterManifest(Path("a"), ())}
    )()
    return Merging(Weights(num_runs), reclaimer, store, clock), reclaimer, adapter


def slow(monkeypatch, clock, seconds):
    """Each eviction takes so long."""
    evict = PrefixCache.evict

    def late(self, block):
        clock.now += seconds
        evict(self, block)

    monkeypatch.setattr(PrefixCache, "evict", late)


def test_pages_are_cleared_in_pieces_of_a_pause(monkeypatch):
    """However many are cached: one run, of two pages, when it begins, then as many as half a step has time for."""
    clock = Clock()
    merging, reclaimer, adapter = merging_of(8, 16, clock)
    slow(monkeypatch, clock, 1 / 64)
    merging.merge(adapter)
    left = [len(reclaimer.prefix)]
    while merging.is_under_way:
        merging.advance(1 / 8)
        left.append(len(reclaimer.prefix))
    assert left[:5] == [14, 10, 6, 2, 0]
    assert merging.longest_pause == 1 / 16
    assert merging.merged is adapter
    assert reclaimer.shadow.num_pages == 16
    reclaimer.pool.check_integrity()


def test_a_merge_goes_on_where_a_step_takes_no_time_that_is_known(monkeypatch):
    clock = Clock()
    merging, reclaimer, adapter = merging_of(3, 6, clock)
    slow(monkeypatch, clock, 1 / 64)
    merging.merge(adapter)
    for left in (2, 0):
        merging.advance(0.0)
        assert len(reclaimer.prefix) == left
    assert merging.is_under_way
    monkeypatch.setattr(Clock, "__call__", lambda self: setattr(self, "now", self.now + 1.0) or self.now)
    merging.advance(0.0)
    assert merging.merged is adapter


def test_a_merge_is_given_up_where_a_request_uses_a_page_of_it_by_now(monkeypatch):
    clock = Clock()
    merging, reclaimer, adapter = merging_of(8, 16, clock)
    slow(monkeypatch, clock, 1 / 64)
    merging.merge(adapter)
    reclaimer.pool.retain([1])
    while merging.is_under_way:
        merging.advance(1 / 8)
    assert merging.merged is merging.shadowed is None
    assert reclaimer.shadow.num_pages == 0
    assert not merging.may_merge(adapter), "not before others have had time to give pages back"
    clock.now += RETRY_SECONDS
    assert merging.may_merge(adapter)
    reclaimer.pool.check_integrity()


@pytest.mark.parametrize("has_room", [True, False])
def test_the_search_for_pages_is_a_pause(has_room):
    now, taken = [5.0], []

    def find_runs(sizes, wished):
        now[0] += 0.25
        return [range(1, 3)] if has_room else None

    shadow = SimpleNamespace(take=taken.append, give_up=lambda: None)
    reclaimer = SimpleNamespace(shadow=shadow, find_runs=find_runs, clear=lambda run: 0)
    backend = SimpleNamespace(
        sizes=lambda adapter: [2], wished_runs=lambda adapter: None, begin=lambda adapter, runs: None
    )
    store = SimpleNamespace(hold=lambda adapter: None, let_go=lambda adapter: None)
    merging = Merging(backend, reclaimer, store, lambda: now[0])
    adapter = type(
        "Resident", (), {"name": "a", "pages": (7,), "transfer": None, "manifest": AdapterManifest(Path("a"), ())}
    )()
    if has_room:
        merging.merge(adapter)
        assert taken == [[range(1, 3)]]
    else:
        with pytest.raises(CannotMerge, match="no room"):
            merging.merge(adapter)
    assert merging.longest_pause == 0.25


@pytest.mark.parametrize("failing", ["sizes", "wished_runs", "begin", "advance"])
def test_whatever_a_merge_raises_is_that_it_cannot_merge(monkeypatch, failing):
    """Also of a policy's choice, which comes inside a step: nothing of the merge is left, and it is not tried again."""
    merging, reclaimer, adapter = merging_of(2, 4, Clock())
    held = []
    merging._store.hold, merging._store.let_go = held.append, held.remove  # noqa: SLF001 - who holds it
    dropped = []
    monkeypatch.setattr(Weights, "drop", lambda self: dropped.append(True))

    def fail(self, *arguments):
        raise AttributeError("no such slot")

    monkeypatch.setattr(Weights, failing, fail)
    if failing == "advance":
        merging.merge(adapter)
        while merging.is_under_way:
            merging.advance(1.0)
    else:
        with pytest.raises(CannotMerge, match="merging it failed: AttributeError: no such slot"):
            merging.merge(adapter)
    assert merging.merged is merging.shadowed is None
    assert not held
    assert bool(dropped) == (failing in ("begin", "advance"))
    assert reclaimer.shadow.num_pages == 0
    reclaimer.pool.check_integrity()
    assert not merging.may_merge(adapter)
    with pytest.raises(CannotMerge, match="merging it failed"):
        merging.merge(adapter)
    merging.advance(1.0)


def test_the_loss_of_an_executor_is_no_refusal(monkeypatch):
    merging, _, adapter = merging_of(2, 4, Clock())

    def fail(self, *arguments):
        raise ExecutorLost("the device is gone")

    monkeypatch.setattr(Weights, "begin", fail)
    with pytest.raises(ExecutorLost):
        merging.merge(adapter)


def test_weights_without_pages_are_given_up_for_those_of_another_adapter():
    """An adapter of embeddings alone changes no matrix of a layer: its merged weights are the model's own."""
    merging, _, adapter = merging_of(num_runs=0, num_cached=0, clock=Clock())
    merging.merge(adapter)
    merging.advance(1.0)
    assert merging.merged is adapter
    merging.merge(type(adapter)())
    assert merging.merged is None, "steps would use weights that are still being made"
    merging.advance(1.0)
    assert merging.merged is not None
    assert merging.merged is not adapter
