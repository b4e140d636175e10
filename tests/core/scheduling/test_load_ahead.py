"""Adapters that can't be read, or never come: their own requests are told, all others go on."""

from __future__ import annotations

import shutil
import threading
import time

import pytest

from chorus.core.requests.types import FinishReason
from chorus.memory.adapters.adapter import Tier
from chorus.memory.files.error import AdapterFormatError, LoadFailure
from chorus.memory.host.image import HostImage
from chorus.memory.host.images import ThreadReads
from chorus.memory.host.reads import ReadStalled

from ...memory.fakes import SlowReads

pytestmark = pytest.mark.wide

HUNG, OTHER = "r1-all", "r2-qv"


@pytest.fixture
def gqa(subject):
    return subject("gqa")


def patch_read(driver, name, before):
    """Have `before` called when the adapter `name` is read."""
    backend = driver.executor.adapters
    read, path = backend.read, driver.engine.store.get(name).manifest.path

    def patched(manifest, layout, image):
        if manifest.path == path:
            before()
        read(manifest, layout, image)

    backend.read = patched


@pytest.mark.parametrize("prefetch", [0, 4])
def test_an_adapter_that_cannot_be_read_ends_its_waiting_requests_alone(gqa, drive, prefetch):
    reads = SlowReads()
    driver = drive(gqa, reads=reads, prefetch=prefetch, max_num_seqs=1, max_load_stall_seconds=0.0)

    def fail():
        raise AdapterFormatError("tensor so-and-so holds NaN")

    patch_read(driver, HUNG, fail)
    driver.add("base", None, [5] * 9, max_tokens=20)
    driver.step()
    driver.add("x", HUNG, [7] * 5, max_tokens=4)
    driver.add("y", HUNG, [7] * 5, max_tokens=4)
    driver.step()
    reads.finish()
    assert driver.engine.store.tier(driver.engine.store.get(HUNG)) is Tier.FAILED
    driver.step()
    for id in "xy":
        assert driver.answers[id].finish_reason is FinishReason.ERROR, "it need not wait for a slot to be told"
        assert "so-and-so holds NaN" in driver.answers[id].error
    assert driver.engine.store.tier(driver.engine.store.get(HUNG)) is Tier.DISK
    assert driver.drain()["base"].tokens == gqa.greedy(None, [5] * 9, 20)
    assert driver.engine.stats().num_failed_reads == 1


def test_a_load_ahead_that_fails_raises_nothing(gqa, drive):
    driver = drive(gqa, prefetch=4, max_num_seqs=1)
    backend, place = driver.executor.adapters, driver.executor.adapters.load
    backend.load = lambda *args: (_ for _ in ()).throw(RuntimeError("no copy"))
    driver.add("base", None, [5] * 9, max_tokens=20)
    driver.add("x", OTHER, [7] * 5, max_tokens=4)
    for _ in range(4):
        driver.step()
    backend.load = place
    answers = driver.drain()
    assert answers["base"].tokens == gqa.greedy(None, [5] * 9, 20)
    assert answers["x"].tokens == gqa.greedy(OTHER, [7] * 5, 4)


def test_a_file_that_hangs_fails_its_requests_and_holds_up_nobody(gqa, drive):
    now, go = [1.0], threading.Event()
    driver = drive(gqa, reads=ThreadReads(1), clock=lambda: now[0], lookahead=1, adapter_read_seconds=20.0)
    patch_read(driver, HUNG, lambda: go.wait(120))
    try:
        driver.add("x", HUNG, [7] * 5, max_tokens=4)
        driver.add("y", OTHER, [7] * 5, max_tokens=4)
        deadline = time.monotonic() + 60
        while driver.answers["y"].finish_reason is None:
            assert time.monotonic() < deadline, "it waits behind the file that hangs"
            now[0] += 0.1 if now[0] < 10 else 0.0
            driver.step()
        assert driver.answers["y"].tokens == gqa.greedy(OTHER, [7] * 5, 4)
        assert driver.answers["x"].finish_reason is None
        while (stats := driver.engine.stats()).num_reads > 1:  # y's thread may have brought all and not yet ended
            assert time.monotonic() < deadline
            driver.step()
        assert stats.num_reads == 1
        assert 0 < stats.oldest_read_seconds < 20
        while driver.answers["x"].finish_reason is None:
            assert time.monotonic() < deadline
            now[0] += 1
            driver.step()
        answers = driver.drain()
        assert answers["x"].finish_reason is FinishReason.ERROR
        assert "was abandoned" in answers["x"].error and answers["x"].failure == "adapter_timeout"
        assert driver.engine.stats().num_timed_out_reads == 1
        driver.add("z", HUNG, [7] * 5, max_tokens=4)
        assert "still hangs" in driver.drain()["z"].error
    finally:
        go.set()


def test_what_the_arena_could_never_hold_is_refused_before_it_is_read(gqa, drive):
    driver = drive(gqa, adapters={}, num_pages=2)
    driver.executor.adapters.read = lambda *args: pytest.fail("it was read")
    with pytest.raises(AdapterFormatError, match="pages of the pool"):
        driver.engine.adapters.check(gqa.adapters[HUNG])


def test_a_running_version_outlives_its_directory(gqa, drive, tmp_path):
    """It is overwritten in place and preempted, and host memory keeps nothing that it may drop."""
    path = tmp_path / "voice"
    shutil.copytree(gqa.adapters[HUNG], path)
    driver = drive(gqa, adapters={"voice": path, "other": gqa.adapters[OTHER]}, host_cache_bytes=0)
    driver.add("x", "voice", [7] * 5, max_tokens=8)
    for _ in range(3):
        driver.step()
    for file in gqa.adapters[OTHER].iterdir():
        shutil.copy(file, path / file.name)
    driver.engine.store.register("voice", path)
    driver.add("y", "voice", [7] * 5, max_tokens=8)
    for _ in range(3):
        for request in list(driver.engine.scheduler.running):
            driver.engine.scheduler.lifecycle.preempt(request)
        driver.engine.reclaimer.reclaim_all()
        driver.add(f"other-{driver.engine.stats().num_steps}", "other", [9] * 4, max_tokens=2)
        driver.step()
    answers = driver.drain()
    assert answers["x"].tokens == gqa.greedy(HUNG, [7] * 5, 8)
    assert answers["y"].tokens == gqa.greedy(OTHER, [7] * 5, 8)


def test_what_was_checked_is_what_is_served(gqa, drive, tmp_path):
    """Its directory is overwritten in place after the check and before anybody has asked for it."""
    path = tmp_path / "voice"
    shutil.copytree(gqa.adapters[HUNG], path)
    driver = drive(gqa, adapters={})
    image = HostImage()
    manifest = driver.engine.adapters.check(path, image=image)
    driver.engine.store.register("voice", manifest, image=image)
    for file in gqa.adapters[OTHER].iterdir():
        shutil.copy(file, path / file.name)
    driver.add("x", "voice", [7] * 5, max_tokens=8)
    assert driver.drain()["x"].tokens == gqa.greedy(HUNG, [7] * 5, 8)


def test_pinning_waits_for_no_read(gqa, drive):
    """A pin is asked for again until its read has ended; other streams go on meanwhile."""
    go = threading.Event()
    driver = drive(gqa, reads=ThreadReads(1), clock=time.monotonic, adapter_read_seconds=30.0)
    engine, adapter = driver.engine, driver.engine.store.get(HUNG)
    patch_read(driver, HUNG, lambda: go.wait(1))
    driver.add("base", None, [5] * 9, max_tokens=4)
    assert engine.adapters.pin(HUNG) is False
    assert not go.is_set()
    assert engine.stats().num_reads == 1, "it waited for the read"
    assert adapter not in engine.store.pins
    assert driver.held_pages() == 0
    assert driver.drain()["base"].tokens == gqa.greedy(None, [5] * 9, 4)
    go.set()
    deadline = time.monotonic() + 60
    while not engine.adapters.pin(HUNG):
        assert time.monotonic() < deadline
        engine.store.images.wait(0.1)
    assert engine.adapters.pin(HUNG) is True
    assert adapter in engine.store.pins
    assert driver.held_pages() == adapter.num_pages
    assert driver.run("x", HUNG, [7] * 5, max_tokens=4).tokens == gqa.greedy(HUNG, [7] * 5, 4)


def test_a_pin_whose_read_is_given_up_holds_nothing(gqa, drive):
    now, go = [1.0], threading.Event()
    driver = drive(gqa, reads=ThreadReads(1), clock=lambda: now[0], adapter_read_seconds=20.0)
    engine, adapter = driver.engine, driver.engine.store.get(HUNG)
    began = threading.Event()
    patch_read(driver, HUNG, lambda: (began.set(), go.wait(120)))
    try:
        assert engine.adapters.pin(HUNG) is False
        assert began.wait(60)
        for _ in range(40):
            now[0] += 1
            engine.store.images.watch()
        with pytest.raises(ReadStalled, match="was abandoned"):
            engine.adapters.pin(HUNG)
        assert (adapter.references, adapter.requests, adapter.pages) == (0, 0, [])
        assert adapter not in engine.store.pins
        with pytest.raises(ReadStalled, match="still hangs"):
            engine.adapters.pin(HUNG)
        engine.check_integrity()
    finally:
        go.set()


@pytest.mark.parametrize(("adapter", "num_tokens", "num_pages"), [(None, 200, 17), ("r33-all", 20, 34)])
def test_who_was_accepted_before_adapters_were_pinned_is_told_that_they_leave_no_room(
    gqa, drive, adapter, num_tokens, num_pages
):
    names = filter(None, ["r8-attention", adapter])
    driver = drive(gqa, adapters={name: gqa.adapters[name] for name in names}, num_pages=num_pages)
    driver.add("large", adapter, [5] * num_tokens, max_tokens=1)
    assert driver.engine.adapters.pin("r8-attention")
    driver.add("small", None, [5] * 9, max_tokens=2)
    answers = driver.drain()
    assert answers["large"].finish_reason is FinishReason.ERROR and "pinned adapters" in answers["large"].error
    assert answers["large"].failure is LoadFailure.NO_ROOM
    assert answers["small"].tokens == gqa.greedy(None, [5] * 9, 2)
