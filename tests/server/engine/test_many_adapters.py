"""Repeated work of the engine's thread must not grow with the registered adapters."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.request import Request
from chorus.core.requests.request_params import RequestParams
from chorus.perf.bench.schedule_time import FakeExecutor, StoppedReads
from chorus.server.cluster.replica import _about
from chorus.server.cluster.report import LearnedCosts
from chorus.server.engine.adapter_health import AdapterHealthChecker
from chorus.server.engine.engine_adapters import EngineAdapters
from chorus.server.engine.engine_view import EngineView

REGISTERED = 400


@pytest.fixture
def engine(monkeypatch):
    """An engine with `REGISTERED` adapters, of which one is resident; its store counts the tiers that are asked for."""
    executor = FakeExecutor(64)
    config = EngineConfig(model=Path("none"), num_pages=64, max_num_seqs=4, host_cache_bytes=1 << 20)
    it = Engine(config, executor, reads=StoppedReads())
    for index in range(REGISTERED):
        it.store.register(f"a{index}", Path(f"a{index}-4"))
    it.add_request(Request("r", [1] * 4, RequestParams(max_tokens=4, ignore_eos=True), "a7"))
    it.step()
    tier, asked = it.store.tier, []
    monkeypatch.setattr(it.store, "tier", lambda adapter: (asked.append(adapter.name), tier(adapter))[1])
    it.asked = asked
    yield it
    it.close()


def ended(engine):
    """Runs a function of the registry at once."""

    def call(function):
        future = Future()
        future.set_result(function(engine))
        return future

    return call


def test_a_replicas_report_looks_at_cached_adapters_alone(engine):
    assert _about(LearnedCosts(), engine)["tiers"] == {"a7": "device"}
    assert set(engine.asked) == {"a7"}


def test_a_view_for_metrics_looks_at_cached_adapters_alone(engine):
    view = EngineView.of(engine)
    assert [one.name for one in view.adapters] == ["a7"]
    assert view.tier_counts["disk"] == REGISTERED - 1 and view.tier_counts["device"] == 1
    assert {"a0", "a0@1", "a7@1"} <= view.labels()
    assert set(engine.asked) == {"a7"}


def test_the_keeper_looks_at_adapters_that_it_has_something_to_do_for(engine):
    for index in range(1, REGISTERED):
        adapter = engine.store.get(f"a{index}")
        engine.store.note(adapter, dataclasses.replace(adapter.manifest, content_hash=f"{index:064}", no_effect=False))
    adapters = EngineAdapters(ended(engine), get=engine.store.get)
    assert [one.name for one in adapters.unhashed().result()] == ["a0"]
    assert adapters.overflowing().result() == []
    assert set(engine.asked) == {"a0"}


def test_adapters_in_the_arena_are_hashed_first(engine):
    """KV events of their blocks wait for it."""
    adapters = EngineAdapters(ended(engine), get=engine.store.get)
    health_checker = AdapterHealthChecker(SimpleNamespace(adapters=adapters), 1.0)
    names = [one.name for one in health_checker._unhashed()]  # noqa: SLF001
    assert names[0] == "a7" and len(names) == REGISTERED


def test_a_list_of_all_is_made_when_it_is_asked_for_and_not_between_two_steps(engine):
    listing = EngineAdapters(ended(engine), get=engine.store.get).listing().result()
    assert engine.asked == []
    engine.store.unregister("a3")
    names = [one.name for one in listing.adapters()]
    assert names == sorted(f"a{index}" for index in range(REGISTERED))
