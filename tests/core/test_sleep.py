"""Sleep and the reset of the prefix cache: memory is freed, and every answer stays as it was."""

from __future__ import annotations

import pytest

from chorus.core import sleep as module
from chorus.core.requests.request_params import InvalidRequest
from chorus.core.sleep import CannotSleep, Sleep

pytestmark = pytest.mark.pairs(alone="kernels")

PROMPT = list(range(5, 45))
ADAPTERS = (None, "r8-attention", "r1-all")


def answers(driver, name):
    for adapter in ADAPTERS:
        driver.add(f"{name}-{adapter}", adapter, PROMPT, max_tokens=12)
    driver.drain()
    return [driver.answers[f"{name}-{adapter}"].tokens for adapter in ADAPTERS]


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_after_sleep_every_adapter_answers_as_before_and_requests_go_on(subject, drive, preemption):
    driver = drive(subject("gqa"), block_tokens=8, preemption=preemption)
    engine, before = driver.engine, answers(driver, "before")
    engine.store.pin(engine.store.get("r8-attention"))
    for adapter in ADAPTERS:
        driver.add(f"within-{adapter}", adapter, PROMPT, max_tokens=12)
    for _ in range(4):
        driver.step()
    assert engine.stats().num_kv_pages and engine.stats().num_adapter_pages
    slept = Sleep(engine)
    stats = engine.stats()
    assert stats.num_free_pages == stats.num_pages and not stats.num_running
    assert not engine.executor.inner.arena.pages.any(), "the system has the memory back"
    engine.check_integrity()
    slept.wake()
    assert engine.store.is_pinned(engine.store.get("r8-attention"))
    driver.drain()
    assert [driver.answers[f"within-{adapter}"].tokens for adapter in ADAPTERS] == before
    assert answers(driver, "after") == before


def test_an_executor_that_keeps_its_memory_says_so(subject, drive, monkeypatch):
    driver = drive(subject("gqa"))
    monkeypatch.setattr(type(driver.executor), "release_pages", None)
    with pytest.raises(InvalidRequest, match="only an engine that runs on the CPU"):
        Sleep(driver.engine)


def test_an_engine_whose_copies_do_not_end_stays_awake(subject, drive, monkeypatch):
    driver = drive(subject("gqa"))
    before = answers(driver, "before")
    monkeypatch.setattr(module, "SETTLE_SECONDS", 0.0)
    held = driver.engine.pool.allocate(1, 2)
    with pytest.raises(CannotSleep):
        Sleep(driver.engine)
    driver.engine.pool.release(held)
    assert answers(driver, "after") == before


@pytest.mark.parametrize("resets", [False, True])
def test_a_reset_cache_is_empty_and_running_requests_answer_alike(subject, drive, resets):
    driver = drive(subject("gqa"), block_tokens=8)
    engine, before = driver.engine, answers(driver, "before")
    driver.add("running", "r8-attention", PROMPT, max_tokens=12)
    for _ in range(4):
        driver.step()
    assert engine.reset_prefix_cache(reset_running_requests=resets) > 0
    assert len(engine.prefix) == 0 == engine.stats().num_cached_pages
    engine.check_integrity()
    driver.drain()
    answer = driver.answers["running"]
    assert answer.tokens == before[1] and answer.num_preemptions == resets
    if not resets:
        assert not len(engine.prefix), "what was computed before the reset does not come back"
    driver.add("cold", None, PROMPT, max_tokens=12)
    assert driver.drain()["cold"].num_cached_tokens == 0 and driver.answers["cold"].tokens == before[0]
    driver.add("warm", None, PROMPT, max_tokens=12)
    assert driver.drain()["warm"].num_cached_tokens > 0


def test_windows_and_states_are_forgotten_too(tiny, drive):
    for family in ("gemma-3", "lfm2"):
        subject = tiny(family)
        driver = drive(subject, block_tokens=8, state_checkpoint_tokens=8)
        driver.add("one", None, PROMPT, max_tokens=8)
        tokens = driver.drain()["one"].tokens
        driver.add("two", None, PROMPT, max_tokens=8)
        for _ in range(3):
            driver.step()
        driver.engine.reset_prefix_cache()
        assert len(driver.engine.prefix) == 0
        driver.engine.check_integrity()
        assert driver.drain()["two"].tokens == tokens
        driver.engine.check_integrity()
