"""Sleep and the reset of the prefix cache: memory is freed, and every answer stays as it was."""

from __future__ import annotations

import pytest

from chorus.core import sleep as module
from chorus.core.requests.request_params import InvalidRequest
from chorus.core.sleep import CannotSleep, Sleep
from chorus.memory.pages.pool import OutOfPages
from chorus.server.engine.engine_adapters import EngineNames

pytestmark = pytest.mark.wide

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
    engine.store.pins.add(engine.store.get("r8-attention"))
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
    assert engine.store.get("r8-attention") in engine.store.pins
    driver.drain()
    assert [driver.answers[f"within-{adapter}"].tokens for adapter in ADAPTERS] == before
    assert answers(driver, "after") == before


def test_pins_change_in_its_sleep(subject, drive):
    """An adapter gets a new version, others are unpinned, removed or pinned: awake, the engine has what is pinned."""
    driver = drive(subject("gqa"), block_tokens=8)
    engine, store = driver.engine, driver.engine.store
    before = answers(driver, "before")
    names = ["r8-attention", "r1-all", "r3-mlp"]
    for name in names:
        assert engine.adapters.pin(name)
    slept = Sleep(engine)
    assert all(store.get(name) in store.pins for name in names) and store.pins.num_pages
    assert not any(store.get(name).pages for name in names), "asleep nothing has pages"
    adapters = EngineNames(engine)
    old = store.get("r8-attention")
    adapters.register("r8-attention", old.manifest, None)
    while not engine.adapters.pin("r8-attention"):  # once its weights are read
        pass
    engine.adapters.unpin("r1-all")
    engine.adapters.remove("r3-mlp")
    assert engine.adapters.pin("r2-qv") and not store.get("r2-qv").pages
    engine.check_integrity()
    slept.wake()
    assert {name for name in store.names() if store.get(name) in store.pins} == {"r8-attention", "r2-qv"}
    assert {one.name for one in store.resident()} == {"r8-attention", "r2-qv"} and not old.pages
    engine.check_integrity()
    assert answers(driver, "after") == before


def test_what_cannot_be_loaded_again_is_no_longer_pinned(subject, drive, monkeypatch, caplog):
    driver = drive(subject("gqa"), block_tokens=8)
    engine, store = driver.engine, driver.engine.store
    before = answers(driver, "before")
    for name in ("r8-attention", "r1-all"):
        engine.adapters.pin(name)
    slept = Sleep(engine)
    with monkeypatch.context() as patch:
        acquire = store.acquire
        patch.setattr(store.pins, "_acquire", lambda one: fail() if one.name == "r8-attention" else acquire(one))
        slept.wake()
    assert "adapter r8-attention is no longer pinned, since it can't be loaded: no pages" in caplog.text
    assert store.get("r8-attention") not in store.pins and store.get("r1-all") in store.pins
    engine.check_integrity()
    assert answers(driver, "after") == before


def fail():
    raise OutOfPages("no pages")


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
