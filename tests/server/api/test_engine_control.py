"""Routes by which trainers stop, empty and start the engine."""

from __future__ import annotations

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.sleep import Sleep

ROUTES = {
    "POST": (
        "/sleep",
        "/wake_up",
        "/reset_prefix_cache",
        "/reset_mm_cache",
        "/reset_encoder_cache",
        "/pause_generation",
        "/continue_generation",
        "/flush_cache",
    ),
    "GET": ("/is_sleeping", "/is_paused"),
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
    health = live.client.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "asleep")
    assert live.client.post("/resume").status_code == 409, "it would run steps without pages"
    assert live.client.post("/wake_up?tags=weights").status_code == 200
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": True}, "the KV cache still sleeps"
    assert live.client.post("/wake_up?tags=kv_cache").status_code == 200
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert live.client.get("/health").json()["status"] == "ok"
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


def test_what_ends_a_sleep_and_a_pause_is_told(live):
    def told():
        refused = live.client.post("/resume")
        assert refused.status_code == 409
        return refused.json()["error"]["message"]

    live.client.post("/sleep")
    assert told() == "the engine is asleep; POST /wake_up wakes it"
    live.client.post("/wake_up")
    live.client.post("/pause?mode=keep")
    live.client.post("/sleep")
    assert told() == "the engine is asleep, and was paused before; POST /wake_up, and then resume it"
    live.client.post("/wake_up")
    assert live.client.get("/is_paused").json() == {"is_paused": True}
    assert live.client.post("/resume").status_code == 200
    assert ask(live).status_code == 200


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
        ("/sleep?level=0", "level", "level 0, which frees nothing, is POST /pause?mode=keep"),
        ("/sleep?level=deep", "level", "must be a whole number"),
        ("/sleep?mode=abort", "mode", "only keep is supported"),
        ("/sleep?mode=wait", "mode", "only keep is supported"),
        ("/sleep?tags=weights", "tags", "all of the engine sleeps"),
        ("/sleep?level=1&level=2", "level", "given twice"),
        ("/wake_up?tag=weights", "tag", "did you mean tags?"),
        ("/wake_up?level=1", "level", "there is no field 'level'"),
        ("/pause?mode=keep&wait_for_inflight_requests=true", "wait_for_inflight_requests", "waits for none"),
        ("/pause?mode=keep&clear=1", "clear", "there is no field 'clear'"),
        ("/pause?mode=keep&clear_cache=maybe", "clear_cache", "must be true or false"),
        ("/resume?mode=keep", "mode", "there is no field 'mode'"),
        ("/reset_prefix_cache?tiers=pool&tiers=gpu", "tiers", "tiers names 'gpu'"),
        ("/reset_prefix_cache?tiers=", "tiers", "tiers names ''"),
        ("/reset_prefix_cache?reset_running_request=true", "reset_running_request", "mean reset_running_requests?"),
        ("/reset_prefix_cache?reset_external=true&tiers=pool", "reset_external", "give one of them"),
        ("/flush_cache?timeout=soon", "timeout", "must be a number"),
        ("/flush_cache?tiers=pool", "tiers", "there is no field 'tiers'"),
        ("/continue_generation?mode=in_place", "mode", "there is no field 'mode'"),
    ],
)
def test_a_wrong_request_is_told_what_is_right(start, fake_engine, path, field, says):
    error = start(fake_engine).client.post(path).json()["error"]
    assert error["param"] == field and says in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "field", "says"),
    [
        ("/sleep", '{"level": 2}', "level", "level 2 discards the weights"),
        ("/sleep?level=1", '{"level": 1}', "level", "given twice"),
        ("/wake_up", '{"tags": ["all"]}', "tags", "give kv_cache or weights"),
        ("/wake_up", '{"tags": "weights"}', "tags", "must be a list"),
        ("/pause_generation", '{"mode": "in_place", "foo": 1}', "foo", "there is no field 'foo'"),
        ("/reset_prefix_cache", '{"tiers": ["pool", "gpu"]}', "tiers", "tiers names 'gpu'"),
        *((path, "garbage", None, "must be valid JSON") for path in ROUTES["POST"]),
        *((path, "[1]", None, "must be a JSON object") for path in ROUTES["POST"]),
        *((path, '{"foo": 1}', "foo", "there is no field 'foo'") for path in (*ROUTES["POST"], "/pause", "/resume")),
    ],
)
def test_a_wrong_body_is_told_what_is_right(start, fake_engine, path, body, field, says):
    answer = start(fake_engine).client.post(path, content=body)
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == field and says in error["message"], answer.text


def test_reading_routes_take_no_fields_either(start, fake_engine):
    live = start(fake_engine)
    for path in ("/is_sleeping?tags=weights", "/flush_cache?foo=1"):
        assert live.client.get(path).status_code == 400, path
    assert live.client.get("/flush_cache?timeout=5").status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/pause?mode=keep&clear_cache=false", None),  # SkyRL, prime-rl
        ("/pause?mode=keep&clear_cache=true&wait_for_inflight_requests=false", None),
        ("/pause", {"mode": "keep"}),
        ("/resume", {}),
        ("/pause_generation", {"mode": "in_place", "rid": None}),
        ("/continue_generation", {}),
        ("/continue_generation", {"torch_empty_cache": False}),
        ("/continue_generation", None),
        ("/reset_prefix_cache", {"reset_running_requests": False}),  # SkyRL
        ("/flush_cache?timeout=30", None),
        ("/flush_cache", {}),
        ("/flush_cache", {"timeout": 2.5}),
    ],
)
def test_what_clients_of_other_servers_send_is_taken(start, fake_engine, path, body):
    live = start(fake_engine)
    answer = live.client.post(path) if body is None else live.client.post(path, json=body)
    assert answer.status_code == 200, answer.text


def test_a_reset_in_a_body_is_as_one_in_the_query(start, fake_engine):
    live = start(fake_engine)
    asked = []

    def reset(**arguments):
        asked.append((arguments["reset_running_requests"], tuple(map(str, arguments["tiers"]))))
        return 0

    fake_engine.reset_prefix_cache = reset
    everything = ("pool", "host", "disk")
    for query, body, expected in (
        ("", None, (False, everything)),
        ("?reset_running_requests=true", None, (True, everything)),
        ("", {"reset_running_requests": True}, (True, everything)),
        ("?tiers=pool&tiers=host", None, (False, ("pool", "host"))),
        ("?tiers=disk,pool", None, (False, ("disk", "pool"))),
        ("", {"tiers": ["host"]}, (False, ("host",))),
        ("?reset_external=true", None, (False, everything)),
        ("?reset_external=false", None, (False, ("pool",))),
    ):
        answer = live.client.post(f"/reset_prefix_cache{query}", json=body)
        assert answer.status_code == 200 and asked.pop() == expected, (query, body)


def test_sleep_and_wake_take_their_fields_in_a_body_too(live):
    assert live.client.post("/sleep", json={"level": 1, "mode": "keep"}).status_code == 200
    assert live.client.post("/wake_up", json={"tags": ["weights"]}).status_code == 200
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": True}
    assert live.client.post("/wake_up", json={"tags": ["kv_cache"]}).status_code == 200
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": False}
    assert live.client.post("/sleep?level=1&tags=weights&tags=kv_cache").status_code == 200
    assert live.client.post("/wake_up?tags=weights&tags=kv_cache").status_code == 200
    assert live.client.get("/is_sleeping").json() == {"is_sleeping": False}


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


@pytest.mark.parametrize(
    ("pause", "resume"),
    [("/pause?mode=keep", "/resume"), ("/pause_generation?mode=in_place", "/continue_generation")],
)
def test_whether_the_engine_is_paused(start, fake_engine, pause, resume):
    live = start(fake_engine)
    for path, is_paused in ((None, False), (pause, True), (resume, False)):
        assert path is None or live.client.post(path).status_code == 200
        assert live.client.get("/is_paused").json() == {"is_paused": is_paused}


def test_sleep_and_wake_answer_as_vllm_s(live):
    assert live.client.post("/sleep").json() == {"status": "sleeping", "level": 1}
    assert live.client.post("/wake_up?tags=weights").json() == {"status": "sleeping", "tags": ["weights"]}
    assert live.client.post("/wake_up?tags=kv_cache").json() == {"status": "awake", "tags": ["kv_cache"]}
    assert live.client.post("/wake_up").json() == {"status": "awake", "tags": None}


@pytest.mark.parametrize("path", ["/reset_mm_cache", "/reset_encoder_cache"])
def test_rows_of_images_are_reset(start, fake_engine, path):
    live = start(fake_engine)
    calls = []
    fake_engine.reset_image_rows = lambda: calls.append(path) or 3
    assert live.client.post(path).status_code == 200 and calls == [path]


def test_sglang_s_pause(start, fake_engine):
    live = start(fake_engine)
    assert live.post("/pause_generation", mode="in_place").json()["status"] == "ok"
    assert live.client.post("/continue_generation").json()["status"] == "ok"
    assert live.post(model="base", prompt="abc").status_code == 200
