"""The operator's page over a fake engine: its rights, its files, and its stream."""

from __future__ import annotations

import json
import re
import socket
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from chorus.core.quarantine import Quarantined
from chorus.server.engine.engine_view import Picture
from chorus.server.ui import watchers
from chorus.server.ui.page import FILES, STATIC

pytestmark = pytest.mark.wide

KEY, ADMIN = "sk-an-api-key", "sk-the-admin-key"
PATHS = [*FILES, "/ui/events"]


def bearer(key):
    return {"authorization": f"Bearer {key}"}


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(watchers, "TICK_SECONDS", 0.02)
    monkeypatch.setattr(watchers, "REST", 0)


@contextmanager
def watching(live, headers=None):
    """The events of a new watcher, as names and bodies."""
    with live.client.stream("GET", "/ui/events", headers=headers or {}) as response:
        assert response.status_code == 200, response.read()
        yield events_of(response)


def events_of(response):
    name = None
    for line in response.iter_lines():
        if line.startswith("event: "):
            name = line.removeprefix("event: ")
        elif line.startswith("data: "):
            yield name, json.loads(line.removeprefix("data: "))


def next_where(events, condition):
    return next(body for name, body in events if condition(name, body))


def test_everything_then_what_has_changed(start, fake_engine):
    live = start(fake_engine)
    with watching(live) as events:
        name, body = next(events)
        assert name == "snapshot" and (body["model"], body["watchers"]) == ("base", 1)
        assert body["pages"] == [1, 1, 0, 100], "the reserved page, and free ones"
        assert [row[:2] for row in body["adapters"]] == [["alice", "disk"], ["bob", "disk"]]
        assert next(events)[0] == "delta"
        fake_engine.gate.clear()
        thread = threading.Thread(target=live.post, kwargs={"model": "alice", "prompt": "hello"})
        thread.start()
        fake_engine.gate.set()
        thread.join()
        body = next_where(events, lambda _, body: body["stats"]["generated_tokens"] >= 5)
        first = body if body["point"][2] is not None else next_where(events, lambda _, it: it["point"][2] is not None)
        assert 0 < first["point"][2] <= first["point"][3]


def test_requests_by_adapter_and_tenant(start, fake_engine):
    live = start(fake_engine, settings={"tenant_header": "x-tenant"})
    fake_engine.step_seconds = 0.05
    with watching(live) as events:
        body = {"model": "alice", "prompt": "hello" * 20}
        thread = threading.Thread(
            target=live.client.post, args=["/v1/completions"], kwargs={"json": body, "headers": {"x-tenant": "acme"}}
        )
        thread.start()
        assert next_where(events, lambda _, body: body.get("requests"))["requests"] == [["alice", "acme", 1, 0, 0]]
        assert next_where(events, lambda _, it: it.get("gone_requests"))["gone_requests"] == [["alice", "acme"]]
        thread.join()


def test_nothing_is_computed_while_nothing_watches(start, fake_engine, calls_of):
    live = start(fake_engine)
    pictures, hub = calls_of(live.worker, "picture"), live.app.state.watchers
    live.post(prompt="hello")
    assert not pictures and hub.num_ticks == 0
    with watching(live) as one, watching(live) as two:
        for events in (one, two):
            assert next(events)[0] == "snapshot"
        seen = hub.num_ticks
        for _ in range(5):
            next(one)
            next(two)
        assert hub.num_ticks - seen < 9, "both are sent the same events"
    live.wait_until(lambda: not hub.is_ticking)
    assert not hub.watchers and len(pictures) == hub.num_ticks
    count = hub.num_ticks
    live.post(prompt="hello")
    assert hub.num_ticks == count and not hub.is_ticking
    with watching(live) as events:
        assert next(events)[0] == "snapshot", "it begins anew"


def test_the_number_of_watchers_is_bounded(start, fake_engine, monkeypatch):
    monkeypatch.setattr(watchers, "MAX_WATCHERS", 1)
    live = start(fake_engine)
    with watching(live) as events:
        next(events)
        refused = live.client.get("/ui/events")
        assert refused.status_code == 503 and refused.json()["error"]["code"] == "overloaded"
    live.wait_until(lambda: not live.app.state.watchers.watchers)
    with watching(live) as events:
        assert next(events)[0] == "snapshot"


def test_a_watcher_that_does_not_read_is_dropped_and_holds_up_none(start, fake_engine):
    """Of a page that changes by half a megabyte with each event."""
    live = start(fake_engine)
    names = [f"{index}-{'x' * 200}" for index in range(2000)]
    count = iter(range(10**9))

    def picture():
        done = Future()
        uses = next(count)
        done.set_result(Picture(lambda: [(name, "disk", 8, 2, uses, False, "1", False) for name in names]))
        return done

    live.worker.picture = picture
    hub = live.app.state.watchers
    with socket.create_connection(httpx.URL(live.url).netloc.decode().split(":")) as slow:
        slow.sendall(b"GET /ui/events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        with watching(live) as events:
            next(events)
            live.wait_until(lambda: any(one.is_dropped for one in hub.watchers), 20)
            assert len(hub.watchers) == 2, "it counts until its connection ends"
            kept = [one for one in hub.watchers if one.is_dropped]
            assert kept[0].events.qsize() == 1, "and nothing is kept for it"
            assert next(events)[0] == "delta"
    live.wait_until(lambda: not hub.watchers, 20)


def test_an_engine_that_does_not_answer_is_reported(start, fake_engine, monkeypatch):
    monkeypatch.setattr(watchers, "PICTURE_SECONDS", 0.05)
    live = start(fake_engine)
    with watching(live) as events:
        next(events)
        fake_engine.gate.clear()
        thread = threading.Thread(target=live.post, kwargs={"prompt": "hello"})
        thread.start()
        assert "does not respond" in next_where(events, lambda name, _: name == "trouble")["trouble"]
        fake_engine.gate.set()
        assert next_where(events, lambda name, _: name == "delta")["trouble"] is None
        thread.join()


def test_streams_end_when_the_server_drains(start, fake_engine):
    live = start(fake_engine)
    with watching(live) as events:
        next(events)
        live.app.state.gate.draining = True
        assert all(name == "delta" for name, _ in events), "and it has an end"
        assert live.client.get("/ui/events").json()["error"]["code"] == "draining"
    live.wait_until(lambda: not live.app.state.watchers.watchers)


def test_data_need_an_admin_key_where_there_are_keys(start, fake_engine):
    live = start(fake_engine, settings={"api_key": [KEY], "admin_key": [ADMIN]})
    for path in FILES:
        assert live.client.get(path).status_code == 200
    for path in ("/ui/events", "/server_info"):
        assert live.client.get(path).status_code == 401
        refused = live.client.get(path, headers=bearer(KEY))
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "admin_key_required"
    assert live.client.get("/server_info", headers=bearer(ADMIN)).status_code == 200
    with watching(live, bearer(ADMIN)) as events:
        assert next(events)[0] == "snapshot"


@pytest.mark.parametrize("settings", [{"api_key": [KEY]}, {"admin_key": [ADMIN]}], ids=["api keys", "admin keys"])
def test_without_an_admin_key_no_caller_sees_all_tenants(start, fake_engine, settings):
    live = start(fake_engine, settings=settings)
    headers = bearer(KEY) if "api_key" in settings else {}
    assert live.client.get("/ui/events", headers=headers).status_code == 403


def test_the_page_can_be_left_out(start, fake_engine):
    live = start(fake_engine, settings={"ui": False})
    assert [live.client.get(path).status_code for path in PATHS] == [404] * len(PATHS)


def test_the_files_load_nothing_from_elsewhere(shared):
    """By their policy, which a browser enforces, and by their content."""
    for path, (name, kind) in FILES.items():
        answer = shared.client.get(path)
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "require-trusted-types-for" in policy
        assert answer.headers["content-type"].startswith(kind) and answer.headers["x-content-type-options"] == "nosniff"
        assert answer.content == (STATIC / name).read_bytes()
        assert not re.search(r"(?:https?:)?//[a-z0-9.-]+\.[a-z]{2,}|innerHTML|\beval\(|document\.write", answer.text)
    page = shared.client.get("/ui").text
    assert not re.search(r"<style|\bstyle=|\bon\w+=", page)
    assert re.findall(r'(?:src|href)="([^"#]+)"', page) == ["data:,", "ui/ui.css", "ui/ui.js"]


def test_points_are_kept_before_a_page_is_opened(start, fake_engine, calls_of):
    live = start(fake_engine)
    hub = live.app.state.watchers
    pictures = calls_of(live.worker, "picture")
    live.wait_until(lambda: len(hub.points) > 3)
    live.post(prompt="hello")
    live.wait_until(lambda: hub.points[-1][2] is not None)
    assert not pictures, "the engine is not asked for them"
    with watching(live) as events:
        name, body = next(events)
    assert name == "snapshot" and len(body["points"]) > 4
    assert any(point[2] for point in body["points"][:-1]), "a first token from before it was opened"


def test_errors_and_refusals_are_counted(start, fake_engine):
    live = start(fake_engine)
    with watching(live) as events:
        assert next(events)[1]["failed"] == [0, 0]
        fake_engine.fail_steps = 10
        assert live.post(prompt="hello").status_code == 500
        fake_engine.fail_steps = 0
        assert next_where(events, lambda _, it: it["failed"] != [0, 0])["failed"] == [1, 0]
        fake_engine.refuse_from = 0
        assert live.post(prompt="hello").status_code == 429
        body = next_where(events, lambda _, it: it["failed"][1])
        assert body["failed"] == [1, 1]
    with watching(live) as events:
        points = next(events)[1]["points"]
    assert [sum(point[at] for point in points) for at in (6, 7)] == [1, 1]


def test_versions_pauses_and_quarantined_adapters_are_told(start, fake_engine):
    fake_engine.adapters.quarantine["worn"] = Quarantined("worn", Path("/adapters/worn"), "/adapters/worn: no lora_A")
    fake_engine.adapters.paused.add("bob")
    live = start(fake_engine, settings={"adapter_roots": [Path("/adapters")]})
    with watching(live) as events:
        body = next(events)[1]
        assert [(row[0], *row[6:]) for row in body["adapters"]] == [("alice", "1", False), ("bob", "1", True)]
        assert body["quarantined"] == [["worn", "worn: no lora_A"]], "paths are hidden"
        del fake_engine.adapters.quarantine["worn"]
        assert next_where(events, lambda _, it: it.get("gone_quarantined"))["gone_quarantined"] == ["worn"]


@pytest.mark.parametrize(
    ("method", "path", "options"),
    [
        ("POST", "/v1/adapters", {"json": {"name": "carol", "path": "x"}}),
        ("POST", "/v1/adapters", {"files": {"adapter_config": b"{}"}}),
        ("PATCH", "/v1/adapters/alice", {"json": {"paused": True}}),
        ("PATCH", "/v1/adapters/alice", {"json": {"pinned": True}}),
        ("DELETE", "/v1/adapters/alice", {}),
    ],
)
def test_another_site_s_page_can_change_nothing(start, fake_engine, method, path, options):
    """A browser that runs another site's script says where it is from; the page's own origin may."""
    live = start(fake_engine)
    foreign = {"origin": "https://evil.example"}
    refused = live.client.request(method, path, headers=foreign, **options)
    assert refused.status_code == 403 and refused.json()["error"]["code"] == "origin_not_allowed"
    own = live.client.request(method, path, headers={"origin": live.url}, **options)
    assert own.json().get("error", {}).get("code") != "origin_not_allowed"
