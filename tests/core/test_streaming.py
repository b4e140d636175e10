"""Requests that start while their adapter is read: same tokens, bounded waiting, nothing lost on failure."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from chorus.core.cold_start import ColdStarts
from chorus.core.model.lora.lora_state import LoraState
from chorus.core.model.read_config import read_model_config
from chorus.core.requests.types import FinishReason
from chorus.core.scheduling.load_ahead import LoadPolicy
from chorus.memory.adapters import image as adapter_image
from chorus.memory.adapters.adapter import Adapter, Tier
from chorus.memory.files.error import AdapterFormatError
from chorus.memory.files.manifest import AdapterManifest
from chorus.memory.host.images import ThreadReads
from chorus.memory.pages.adapter_layout import AdapterLayout, AdapterPart
from chorus.memory.pages.eviction import RestoreCosts

pytestmark = pytest.mark.wide

ADAPTER = "r1-all"


@pytest.fixture
def gqa(subject):
    return subject("gqa")


class Gate:
    """Lets a read publish a layer each time `allow` is called; `fail` makes it fail instead."""

    def __init__(self, driver):
        self._permits = threading.Semaphore(0)
        self._error = None
        backend, read = driver.executor.adapters, driver.executor.adapters.read
        backend.read = lambda manifest, layout, image: read(manifest, layout, _Gated(image, self))

    def allow(self, layers=100):
        self._permits.release(layers)

    def begin(self, driver, name=ADAPTER):
        """A step, in which the read is asked for, and its first layer."""
        driver.step()
        self.allow(1)
        stream = driver.engine.store.images.peek(driver.engine.store.get(name)).stream
        assert stream.wait(0, 60.0)

    def fail(self, error):
        self._error = error
        self.allow()

    def pass_through(self):
        self._permits.acquire()
        if self._error is not None:
            raise self._error


class _Gated:
    def __init__(self, image, gate):
        self._image = image
        self._gate = gate

    def __setattr__(self, name, value):
        setattr(self._image, name, value) if name == "data" else super().__setattr__(name, value)

    def __getattr__(self, name):
        return getattr(self._image, name)

    def publish(self, num_ready):
        self._gate.pass_through()
        self._image.publish(num_ready)


@pytest.fixture
def start(gqa, drive, monkeypatch):
    """`start(**config)`: a driver with a base request decoding, reads that a gate holds up, and the gate."""
    for most in ("_FIRST_READ_BYTES", "_LAST_READ_BYTES"):
        monkeypatch.setattr(adapter_image, most, 1)  # else layers as small as here are read at once
    adapter_image.row_jobs.cache_clear()
    gates = []

    def make(**config):
        driver = drive(gqa, reads=ThreadReads(1), clock=time.monotonic, **config)
        gates.append(Gate(driver))
        driver.engine.costs.disk_adapter_page = 0.0
        driver.add("base", None, [5] * 9, max_tokens=40)
        driver.step()
        return driver, gates[-1]

    yield make
    for gate in gates:
        gate.allow()
    adapter_image.row_jobs.cache_clear()


def test_a_prefill_follows_the_read_layer_by_layer(gqa, start):
    timers = []

    def before(plan):
        if not timers and any(row.request_id == "x" for row in plan.sequences):
            timers.extend(threading.Timer(0.02 * count, gate.allow, [1]) for count in range(1, 8))
            for timer in timers:
                timer.start()

    driver, gate = start(max_load_stall_seconds=60.0, before=before)
    driver.add("x", ADAPTER, [7] * 20, max_tokens=8)
    gate.begin(driver)
    driver.step()
    assert timers, "it waited for all of the adapter"
    assert len(driver.answers["x"].tokens) == 1
    answers = driver.drain()
    for timer in timers:
        timer.join()
    assert answers["x"].tokens == gqa.greedy(ADAPTER, [7] * 20, 8)
    assert answers["base"].tokens == gqa.greedy(None, [5] * 9, 40)
    assert driver.engine.stats().num_streamed_loads == 1
    assert driver.engine.store.tier(driver.engine.store.get(ADAPTER)) is Tier.DEVICE


def test_a_read_that_brings_nothing_holds_up_no_step(gqa, start):
    """Its disk may hang: nobody waits for it, though it has not failed yet."""
    driver, gate = start(max_load_stall_seconds=60.0)
    driver.add("x", ADAPTER, [7] * 20, max_tokens=8)
    for _ in range(10):
        driver.step()
    assert len(driver.answers["base"].tokens) == 11
    assert not [plan for plan in driver.plans if any(row.request_id == "x" for row in plan.sequences)]
    gate.allow()
    assert driver.drain()["x"].tokens == gqa.greedy(ADAPTER, [7] * 20, 8)


def test_a_read_that_hangs_holds_up_one_step_and_only_its_own_requests(gqa, start):
    driver, gate = start(max_load_stall_seconds=0.001)
    driver.add("x", ADAPTER, [7] * 20, max_tokens=8)
    driver.add("y", ADAPTER, [7] * 20, max_tokens=8)
    gate.begin(driver)
    for _ in range(9):
        driver.step()
    assert len(driver.answers["base"].tokens) == 11
    assert driver.answers["x"].tokens == driver.answers["y"].tokens == []
    with_x = [plan for plan in driver.plans if any(row.request_id == "x" for row in plan.sequences)]
    assert len(with_x) == 1, "it was computed in vain more than once"
    gate.allow()
    answers = driver.drain()
    want = gqa.greedy(ADAPTER, [7] * 20, 8)
    assert answers["x"].tokens == answers["y"].tokens == want
    assert answers["base"].tokens == gqa.greedy(None, [5] * 9, 40)
    again = driver.run("again", ADAPTER, [7] * 20, max_tokens=8)
    assert again.num_cached_tokens > 0
    assert again.tokens == want, "what was computed in vain was cached"


def test_only_time_that_is_waited_counts(gqa, monkeypatch):
    """A step that computes for longer than it may wait can wait for a late layer all the same."""
    clock = [0.0]
    monkeypatch.setattr("chorus.core.model.lora.lora_state.time", SimpleNamespace(monotonic=lambda: clock[0]))
    asked = []

    class Coming:
        address = 0

        def wait_layer(self, layer, timeout):
            asked.append(timeout)
            clock[0] += min(timeout, waits[layer])
            return waits[layer] <= timeout

    config = read_model_config(gqa.model)
    parts = (AdapterPart(1, 1.0, (0,), ("q_proj",)),)
    layout = AdapterLayout.build(parts, config.projections, page_elems=1 << 12, itemsize=4)
    adapter = Adapter("a", 1, AdapterManifest(Path("a"), parts), layout)
    adapter.transfer = Coming()
    waits = [0.01, 0.005, 0.009]
    for late, waits[2] in ((set(), 0.004), ({0}, 0.009)):
        state = LoraState(config, torch.zeros(4, 1 << 12), max_stall=0.02)
        state.set_step([adapter], [0], [3])
        for layer in range(3):
            state.wait(layer)
            clock[0] += 1.0  # computing
        assert state.late_indices() == late
        assert len(state.in_layers.segments.rows) == (not late), (
            "what lies in its pages may be NaN, and products are shared"
        )
        assert asked[-3:] == pytest.approx([0.02, 0.01, 0.005])


@pytest.mark.parametrize("layers", [0, 1])
def test_a_read_that_fails_on_the_way_fails_its_requests_alone(gqa, start, layers):
    driver, gate = start(max_load_stall_seconds=0.001)
    driver.add("x", ADAPTER, [7] * 20, max_tokens=8)
    if layers:
        gate.begin(driver)
    driver.step()
    gate.fail(AdapterFormatError("tensor so-and-so holds NaN"))
    answers = driver.drain()
    assert answers["x"].finish_reason is FinishReason.ERROR
    assert "so-and-so holds NaN" in answers["x"].error
    assert answers["base"].tokens == gqa.greedy(None, [5] * 9, 40)
    driver.engine.reclaimer.reclaim_all()
    assert driver.held_pages() == 0


def test_a_request_that_is_aborted_on_the_way_leaves_nothing(gqa, start):
    driver, gate = start(max_load_stall_seconds=0.001)
    driver.add("x", ADAPTER, [7] * 20, max_tokens=8)
    gate.begin(driver)
    driver.step()
    assert driver.engine.abort("x")
    driver.step()
    assert driver.engine.store.loads.under_way
    gate.allow()
    driver.add("y", ADAPTER, [7] * 20, max_tokens=8)
    assert driver.drain()["y"].tokens == gqa.greedy(ADAPTER, [7] * 20, 8)
    assert driver.engine.stats().num_adapter_loads == 1
    driver.engine.reclaimer.reclaim_all()
    assert driver.held_pages() == 0


def test_decoding_waits_for_an_adapter_too(gqa, start):
    """A prompt of one token is a decode row from the beginning."""
    driver, gate = start(max_load_stall_seconds=0.001)
    driver.add("x", ADAPTER, [7], max_tokens=8)
    gate.begin(driver)
    for _ in range(3):
        driver.step()
    assert driver.answers["x"].tokens == []
    gate.allow()
    assert driver.drain()["x"].tokens == gqa.greedy(ADAPTER, [7], 8)


class FakeStore:
    def __init__(self, tier, seconds=0.0):
        self.tier = lambda adapter: tier
        self.loads = SimpleNamespace(
            seconds_left=lambda adapter, patience: seconds, is_reading=lambda adapter: tier is Tier.LOADING
        )
        self.images = SimpleNamespace(is_ready=lambda adapter: tier is Tier.HOST)


class FakeAdapter:
    def __init__(self, pages=(), references=0):
        self.pages = list(pages)
        self.references = references


@pytest.mark.parametrize(
    ("tier", "seconds", "may"),
    [(Tier.DISK, 0.0, False), (Tier.HOST, 9.0, True), (Tier.LOADING, 0.23, False), (Tier.LOADING, 0.21, True)],
)
def test_a_request_starts_when_the_rest_comes_with_its_prefill_or_little_later(tier, seconds, may):
    policy = LoadPolicy(
        FakeStore(tier, seconds), RestoreCosts(prefix_page=0.1), ColdStarts(), pages_per_token=1 / 16, max_stall=0.02
    )
    assert policy.may_start(FakeAdapter(), 32) is may


def test_a_read_that_a_request_waited_for_to_the_end_is_counted_once():
    starts, adapter = ColdStarts(), FakeAdapter()
    policy = LoadPolicy(FakeStore(Tier.LOADING), RestoreCosts(), starts, pages_per_token=1 / 16, max_stall=0.0)
    assert not policy.may_start(adapter, 32)
    assert starts == ColdStarts()
    policy.store = FakeStore(Tier.HOST)
    assert policy.may_start(adapter, 32) and policy.may_start(adapter, 32)
    assert starts == ColdStarts(num_waited=1)


def test_a_request_joins_those_that_run_with_its_adapter():
    policy = LoadPolicy(
        FakeStore(Tier.LOADING, 9.0), RestoreCosts(), ColdStarts(), pages_per_token=1 / 16, max_stall=0.02
    )
    assert policy.may_start(FakeAdapter([3], references=1), 1)
    assert not policy.may_start(FakeAdapter([3]), 1)
    there = LoadPolicy(FakeStore(Tier.DEVICE), RestoreCosts(), ColdStarts(), pages_per_token=1 / 16, max_stall=0.02)
    assert there.may_start(FakeAdapter([3]), 1)
