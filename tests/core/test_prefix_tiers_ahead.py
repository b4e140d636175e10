"""Cached prefixes in host memory with a device's copies: a prefix that was copied ahead comes back with its bits.

The engine computes on the CPU. Its pages are copied as on a GPU: by streams of a driver that the test lets run.
"""

from __future__ import annotations

import pytest

from chorus.core.executors import cpu
from chorus.core.executors.swaps import PageSwaps
from chorus.core.kv_events import Removed, Stored
from chorus.core.scheduling import request_memory
from chorus.memory.host.buffers import HostBuffers
from chorus.memory.pages.block import Medium, WindowPages
from chorus.memory.pages.prefix import PrefixCache
from chorus.memory.transfers import pages_ahead
from chorus.memory.transfers.cached_pages import CachedPages
from chorus.memory.transfers.cuda_copies import CudaCopies
from chorus.memory.transfers.dma import Dma
from chorus.memory.transfers.page_copies import PageSave
from chorus.memory.transfers.staging import Staging
from chorus.memory.transfers.swap_backend import CopyMode

from ..memory.fake_cuda import FakeDriver
from .test_prefix_tiers import (
    FAMILIES,
    LIMITS,
    always_copy,
    ask,
    assert_same,
    config_of,
    costs_stay,
    exact,
    few,
    find,
    names_of,
    prompts_of,
)

__all__ = ["costs_stay", "exact"]

pytestmark = pytest.mark.wide


class SleepyDriver(FakeDriver):
    """Its streams run whenever the host asks, but not while it sleeps. The host never waits for it."""

    is_asleep = False
    may_wait = False

    def query(self, event):
        if not self.is_asleep:
            self.finish()
        return super().query(event)

    def synchronize(self, event):
        assert self.may_wait, "the host waits for the device"
        super().synchronize(event)


@pytest.fixture
def device(monkeypatch):
    """The driver of all engines of a test."""
    driver = SleepyDriver()

    def open_swaps(arena, dma):
        staging = Staging([bytearray(64)], lambda image: False, driver.synchronize)  # all images are pinned
        return PageSwaps(arena, Dma(CudaCopies(arena.pages, driver, staging=staging), HostBuffers()))

    monkeypatch.setattr(cpu, "PageSwaps", open_swaps)
    yield driver
    driver.is_asleep, driver.may_wait = False, True


@pytest.fixture
def serve(drive, device):
    """`serve(subject, **config)`: an engine that copies ahead whatever may leave; and one without, if cold."""

    def make(subject, *, cold=False, adapters=None, **config):
        tier = {"prefix_cache": False} if cold else {"host_prefix_cache": "on"}
        driver = drive(subject, adapters=few(subject) if adapters is None else adapters, **{**config, **tier})
        always_copy(driver.engine)
        if not cold:
            driver.engine.host.ahead.horizon = driver.engine.pool.num_pages  # all may leave
        return driver

    return make


@pytest.fixture
def gqa(subject):
    return subject("gqa")


def settle(driver):
    """Let copies begin and end until nothing is left to copy."""
    for _ in range(200):
        driver.engine.scheduler.finish_copies()
        driver.engine.check_integrity()


def wake(device):
    """Let the streams run whatever they were given."""
    device.is_asleep = False
    device.finish()


def begin(driver):
    driver.engine.scheduler.finish_copies()


PROMPT, *OTHERS = prompts_of(seed=5, count=4)


def check_family(tiny, serve, family, **config):
    """All that an evicted prompt had comes back as it was, for adapters and for the base model."""
    subject = tiny(family)
    config = config_of(family, **config)
    cold, warm = serve(subject, cold=True, **config), serve(subject, **config)
    for number, prompt in enumerate(prompts_of(count=2)):
        for adapter in names_of(subject):
            wanted, _ = ask(cold, number, adapter, prompt)
            first, cached = ask(warm, number, adapter, prompt)
            assert cached == 0
            assert_same(first, wanted)
            settle(warm)
            warm.engine.reclaimer.reclaim_all()
            before = warm.engine.stats().num_host_hit_tokens
            again, cached = ask(warm, number, adapter, prompt)
            assert_same(again, wanted)
            assert cached >= 32
            assert warm.engine.stats().num_host_hit_tokens > before


@pytest.mark.wide
@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [(family, dtype) for family in FAMILIES for dtype in ("auto", "fp8") if (family, dtype) != ("deepseek-v3", "fp8")],
)
def test_what_was_copied_ahead_gives_the_bits_of_a_cold_server(tiny, serve, family, kv_cache_dtype):
    check_family(tiny, serve, family, kv_cache_dtype=kv_cache_dtype)


def check_late_copies(gqa, device, serve):
    """Steps go on while copies sleep, and what has left meanwhile is computed again."""
    cold, warm = serve(gqa, cold=True, **LIMITS), serve(gqa, **LIMITS)
    wanted, _ = ask(cold, 0, "r2-qv", PROMPT)
    ask(warm, 0, "r2-qv", PROMPT)
    device.is_asleep = True
    begin(warm)
    assert warm.engine.host.ahead.num_bytes > 0
    begin(warm)
    warm.engine.reclaimer.reclaim_all()
    for number, prompt in enumerate(OTHERS, 1):  # they take the same pages
        for adapter in names_of(gqa):
            assert_same(ask(warm, number, adapter, prompt)[0], ask(cold, number, adapter, prompt)[0])
    wake(device)
    settle(warm)
    found, cached = ask(warm, 0, "r2-qv", PROMPT)
    assert_same(found, wanted)
    assert cached == 0


def test_copies_that_sleep_in_the_driver_delay_no_step_and_restore_nothing_wrong(gqa, device, serve):
    check_late_copies(gqa, device, serve)


def check_late_windows(tiny, device, serve):
    """Pages in windows that leave before their copies have ended, while the rest of their blocks stays."""
    subject = tiny("mistral-window")
    config = config_of("mistral-window")
    cold, warm = serve(subject, cold=True, **config), serve(subject, **config)
    adapter = names_of(subject)[1]
    wanted, _ = ask(cold, 0, adapter, PROMPT)
    ask(warm, 0, adapter, PROMPT)
    device.is_asleep = True
    begin(warm)
    order, num_windows = warm.engine.reclaimer.order, 0
    for item in list(order.upcoming()):
        if isinstance(item, WindowPages):
            order.discard(item)
            warm.engine.prefix.evict(item)
            num_windows += 1
    assert num_windows > 3
    for number, prompt in enumerate(OTHERS, 1):  # they take the same pages
        ask(warm, number, adapter, prompt)
    wake(device)
    settle(warm)
    warm.engine.reclaimer.reclaim_all()
    assert_same(ask(warm, 0, adapter, PROMPT)[0], wanted)


def test_pages_in_windows_that_leave_too_early_restore_nothing_wrong(tiny, device, serve):
    check_late_windows(tiny, device, serve)


def test_a_request_waits_for_its_prefix_while_others_go_on(gqa, device, serve):
    warm = serve(gqa, **LIMITS)
    wanted, _ = ask(warm, 0, "r2-qv", PROMPT)
    settle(warm)
    warm.engine.reclaimer.reclaim_all()
    device.is_asleep = True
    warm.add("waits", "r2-qv", PROMPT, max_tokens=4, logprobs=2)
    warm.add("goes-on", None, OTHERS[0], max_tokens=4)
    for _ in range(40):
        warm.step()
    answers = warm.answers
    assert (len(answers["goes-on"].tokens), answers["waits"].tokens) == (4, [])
    device.is_asleep = False
    warm.drain()
    assert answers["waits"].num_cached_tokens == 48
    assert_same((answers["waits"].tokens, answers["waits"].logprobs), wanted)


def check_reload(gqa, device, serve):
    """A reloaded adapter never meets KV that was on its way to host memory, nor any that has arrived there."""
    new = gqa.adapters["r1-all"]
    cold = serve(gqa, cold=True, adapters={"name": new}, **LIMITS)
    warm = serve(gqa, adapters={"name": gqa.adapters["r2-qv"]}, **LIMITS)
    wanted = [ask(cold, number, "name", prompt)[0] for number, prompt in enumerate((PROMPT, OTHERS[0]))]
    ask(warm, 0, "name", PROMPT)
    settle(warm)
    ask(warm, 1, "name", OTHERS[0])
    device.is_asleep = True
    begin(warm)
    warm.engine.store.register("name", new)
    wake(device)
    settle(warm)
    warm.engine.reclaimer.reclaim_all()
    for number, prompt in enumerate((PROMPT, OTHERS[0])):
        found, cached = ask(warm, number, "name", prompt)
        assert cached == 0
        assert_same(found, wanted[number])


def test_a_reloaded_adapter_never_meets_the_kv_of_its_predecessor(gqa, device, serve):
    check_reload(gqa, device, serve)


def test_a_driver_that_refuses_copies_costs_hits_and_no_request(gqa, device, serve):
    cold, warm = serve(gqa, cold=True, **LIMITS), serve(gqa, **LIMITS)
    wanted, _ = ask(cold, 0, None, PROMPT)
    device.copies_before_failure, device.may_wait = 3, True
    ask(warm, 0, None, PROMPT)
    settle(warm)
    warm.engine.reclaimer.reclaim_all()
    found, _ = ask(warm, 0, None, PROMPT)
    assert_same(found, wanted)
    device.copies_before_failure = -1
    settle(warm)
    warm.engine.reclaimer.reclaim_all()
    found, cached = ask(warm, 0, None, PROMPT)
    assert_same(found, wanted)
    assert cached == 48
    device.copies_before_failure = 2  # of those that bring the prompt back
    warm.engine.reclaimer.reclaim_all()
    found, _ = ask(warm, 0, None, PROMPT)
    assert_same(found, wanted)


def test_stats_count_what_was_copied_and_in_vain(gqa, device, serve):
    warm = serve(gqa, **LIMITS)
    ask(warm, 0, None, PROMPT)
    device.is_asleep = True
    begin(warm)
    warm.engine.reclaimer.reclaim_all()
    stats = warm.engine.stats()
    assert stats.num_ahead_pages == stats.num_void_ahead_pages > 0


def test_events_tell_of_host_memory_once_a_copy_has_ended(gqa, device, serve):
    warm = serve(gqa, **LIMITS)
    events = warm.engine.record_kv_events()
    ask(warm, 0, None, PROMPT)
    device.is_asleep = True
    begin(warm)
    told, _ = events.drain()
    assert {each.medium for each in told} == {Medium.POOL}
    wake(device)
    settle(warm)
    warm.engine.reclaimer.reclaim_all()
    told, _ = events.drain()
    numbers = [{each.number for each in told if type(each) is kind} for kind in (Stored, Removed)]
    assert {each.medium for each in told if isinstance(each, Stored)} == {Medium.HOST}
    assert {each.medium for each in told if isinstance(each, Removed)} == {Medium.POOL}
    assert numbers[0] == numbers[1] and len(numbers[0]) == 13


@pytest.mark.parametrize(("wish", "is_kept"), [("auto", False), ("off", False), ("on", True)])
def test_a_device_keeps_prefixes_in_host_memory_if_it_is_asked_to(gqa, drive, device, wish, is_kept):
    engine = drive(gqa, adapters={}, host_prefix_cache=wish, **LIMITS).engine
    assert (engine.host is not None) == is_kept


def test_where_steps_would_wait_for_copies_no_prefix_is_kept(gqa, drive, monkeypatch):
    def without_streams(arena, dma):
        swaps = PageSwaps(arena, dma)
        swaps.copying = CopyMode.WAITED
        return swaps

    monkeypatch.setattr(cpu, "PageSwaps", without_streams)
    assert drive(gqa, adapters={}, **LIMITS).engine.host is None
    with pytest.raises(ValueError, match="host_prefix_cache is 'on', but steps of this executor would wait"):
        drive(gqa, adapters={}, host_prefix_cache="on", **LIMITS)


# -- faults that the tests above must find


def test_an_image_whose_page_left_too_early_is_found(gqa, device, serve, monkeypatch):
    monkeypatch.setattr(CachedPages, "page_left", lambda self, page: None)
    find(check_late_copies, gqa, device, serve)


def test_an_image_of_a_window_that_left_too_early_is_found(tiny, device, serve, monkeypatch):
    monkeypatch.setattr(CachedPages, "page_left", lambda self, page: None)
    monkeypatch.setattr(CachedPages, "check_integrity", lambda self: None)  # it is to be found by its bits
    find(check_late_windows, tiny, device, serve)


def test_a_copy_that_is_taken_for_complete_is_found(gqa, device, serve, monkeypatch):
    monkeypatch.setattr(pages_ahead, "state_of", lambda transfer: "done")
    find(check_late_copies, gqa, device, serve)


def test_kv_that_goes_by_an_adapter_s_name_is_found(gqa, device, serve, monkeypatch):
    monkeypatch.setattr(request_memory, "_version", lambda adapter: 7)
    monkeypatch.setattr(PrefixCache, "drop_version", lambda self, version: None)
    find(check_reload, gqa, device, serve)


@pytest.mark.parametrize("family", ["gemma-3", "qwen3.5", "deepseek-v3"])
def test_pages_that_are_mixed_up_are_found(tiny, serve, monkeypatch, family):
    """Windows and full attention, states, latents: each page of a block's, or the last one's, in another's place."""
    begin, last = PageSave._begin, list[int]()  # noqa: SLF001

    def shifted(self, at):
        pages = self.pages
        self.pages = [*pages[1:], *(pages[:1] if len(pages) > 1 else last[-1:] or pages)]
        try:
            return begin(self, at)
        finally:
            self.pages = pages
            last.append(pages[at])

    monkeypatch.setattr(PageSave, "_begin", shifted)
    find(check_family, tiny, serve, family)
