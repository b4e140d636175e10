"""Routes by which trainers stop, empty and start the engine."""

from __future__ import annotations

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.sleep import Sleep

ROUTES = {
    "POST": ("/sleep", "/wake_up", "/reset_prefix_cache", "/pause_generation", "/continue_generation", "/flush_cache"),
    "GET": ("/is_sleeping",),
}


@pytest.fixture
def live(start, subject):
    """A server with a real engine."""
    model = subject("wide_heads").model
    return start(Engine.from_config(EngineConfig(model=model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")))


def ask(live):
    return live.post(model="base", prompt=[5, 6, 7, 8] * 8, max_tokens=4, temperature=0)


@pytest.mark.parametrize(("method", "path"), [(method, path) for method, paths in ROUTES.items() for path in paths])
def test_an_admin_key_is_needed(start, fake_engine, method, path):
    live = start(fake_engine, settings={"api_key": ["sk-an-api-key"], "admin_key": ["sk-the-admin-key"]})
    for key, status in ((None, 401), ("sk-an-api-key", 403)):
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        assert live.client.request(method, path, headers=headers).status_code == status


def test_asleep_requests_are_refused_and_afterwards_answered_as_before(live):
    before = ask(live).json()["choices"]
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert live.client.post("/sleep?level=1").status_code == 200
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": True}
    refused = ask(live)
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    assert refused.json()["error"]["code"] == "asleep"
    assert live.client.get("/health").status_code == 200
    assert live.client.post("/resume").status_code == 409, "it would run steps without pages"
    assert live.client.post("/wake_up?tags=weights").status_code == 200
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": True}, "the KV cache still sleeps"
    assert live.client.post("/wake_up?tags=kv_cache").status_code == 200
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert ask(live).json()["choices"] == before


def test_a_wake_that_failed_can_be_tried_again(live, monkeypatch):
    before = ask(live).json()["choices"]
    live.client.post("/sleep")
    with monkeypatch.context() as patch:
        patch.setattr(Sleep, "wake", lambda self: fail())
        assert live.client.post("/wake_up", headers={"connection": "close"}).status_code == 500
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert ask(live).json()["error"]["code"] == "asleep"
    assert live.client.post("/wake_up").status_code == 200
    assert ask(live).json()["choices"] == before


def fail():
    raise RuntimeError("the wake failed")


def test_a_paused_engine_is_still_paused_after_its_sleep(live):
    live.client.post("/pause?mode=keep")
    live.client.post("/sleep")
    live.client.post("/wake_up")
    live.client.post("/wake_up")
    assert live.worker.call(lambda engine: engine.has_work()).result(5) is False
    future = live.worker.picture()
    assert future.result(5) is not None
    assert live.client.post("/resume").json() == {"status": "resumed"}
    assert ask(live).status_code == 200


@pytest.mark.parametrize(
    ("path", "field", "says"),
    [
        ("/sleep?level=2", "level", "level 2 discards the weights"),
        ("/wake_up?tags=all", "tags", "give kv_cache or weights"),
        ("/reset_prefix_cache?reset_running_requests=maybe", "reset_running_requests", "must be true or false"),
        ("/reset_prefix_cache?tiers=host,gpu", "tiers", "tiers names 'gpu'; give some of pool, host, disk"),
        ("/pause_generation", "mode", "only in_place is supported"),
    ],
)
def test_a_wrong_request_is_told_what_is_right(start, fake_engine, path, field, says):
    error = start(fake_engine).client.post(path).json()["error"]
    assert error["param"] == field and says in error["message"]


def test_the_prefix_cache_is_reset(live):
    ask(live)
    cached = ask(live).json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    for path in ("/reset_prefix_cache", "/reset_prefix_cache?reset_running_requests=true", "/flush_cache"):
        assert live.client.post(path).status_code == 200
        assert ask(live).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, path


def test_the_tiers_that_are_named_are_reset(live):
    """A prompt that left the page pool comes from host memory, unless that was reset."""

    def cached():
        return ask(live).json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    def evict(engine):
        engine.costs.host_prefix_page = 0.0  # it is worth a copy
        engine.reclaimer.reclaim_all()

    cached()
    live.worker.call(evict).result(5)
    assert live.client.post("/reset_prefix_cache?tiers=pool,disk").status_code == 200
    assert cached() > 0, "host memory was not named"
    live.worker.call(evict).result(5)
    assert live.client.post("/reset_prefix_cache?tiers=host").status_code == 200
    assert cached() == 0


def test_sglang_s_pause(start, fake_engine):
    live = start(fake_engine)
    assert live.post("/pause_generation", mode="in_place").json()["status"] == "ok"
    assert live.client.post("/continue_generation").json()["status"] == "ok"
    assert live.post(model="base", prompt="abc").status_code == 200
