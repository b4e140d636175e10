"""No route asks the disk on the event loop's thread, and a disk of uploads that hangs holds up nothing else."""

import asyncio
import base64
import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.memory.files.uploads.content_store import ContentStore, StagedUpload
from chorus.server.http.doors import GuardedRoute

from ..attacks.swaps import FILES, NAME
from .blocking_calls import watching

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def serve(start, reference, tmp_path):
    root = tmp_path / "root"
    shutil.copytree(reference.adapters["r2-qv"], root / "one")
    shutil.copytree(reference.adapters["r3-mlp"], root / "sourced")

    def serve(**settings):
        config = EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
        named = {"adapter_uploads": tmp_path / "uploads", "model": reference.model, **settings}
        return start(Engine.from_config(config), adapter_roots=(root,), settings=named)

    return serve


def form(path, name=NAME, field="lora_name"):
    files = {file: (file, (path / file).read_bytes()) for file in FILES}
    return {"data": {field: name}, "files": files}


def loop_thread(live):
    async def ident():
        return threading.get_ident()

    return asyncio.run_coroutine_threadsafe(ident(), live.loop).result(20)


def bodies(reference):
    """A body for each route that takes one; several for routes with several forms."""
    path = reference.adapters["r2-qv"]
    config, weights = ((path / file).read_bytes() for file in FILES)
    sent = {"adapter_config": json.loads(config), "adapter_model": base64.b64encode(weights).decode()}
    prompt = {"prompt": [5, 6], "max_tokens": 2}
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    return {
        "/v1/completions": [
            prompt,
            {**prompt, "stream": True},
            {**prompt, "model": "one"},
            {**prompt, "model": "nobody"},
            {**prompt, "model": "sources/sourced"},
            {**prompt, "model": "sources/nobody"},
        ],
        "/v1/chat/completions": [chat],
        "/v1/messages": [chat],
        "/v1/responses": [{"input": "a", "max_output_tokens": 2}],
        "/v1/adapters": [
            {"name": "one", "path": "one"},
            {"name": "none", "path": "nowhere"},
            {"name": "sent", **sent},
            form(path, field="name"),
            {"data": {"name": "x"}, "files": {"y": ("y", b"")}},
        ],
        "/v1/load_lora_adapter": [{"lora_name": "two", "lora_path": "one"}, form(path, "formed")],
        "/v1/unload_lora_adapter": [{"lora_name": "two"}, {"lora_name": "nobody"}],
        "/tokenize": [{"prompt": "a"}],
        "/detokenize": [{"tokens": [5]}],
    }


def ask(live, method, path, body):
    if "files" in body:
        return live.client.request(method, path, **body)
    return live.client.request(method, path, json=body)


def ask_all(live, reference):
    """Ask every route of the app."""
    given = bodies(reference)
    routes = [route for route in live.app.routes if isinstance(route, GuardedRoute)]
    order = {"POST": 0, "GET": 1, "PATCH": 2, "DELETE": 3}
    for route in sorted(routes, key=lambda one: min(order.get(method, 9) for method in one.methods or ())):
        for method in sorted((route.methods or set()) - {"HEAD"}):
            path = route.path.replace("{name:path}", "one")
            if path == "/ui/events":
                with live.client.stream(method, path) as stream:
                    next(stream.iter_raw(), None)
                continue
            if path == "/pause":
                continue  # the last
            for body in given.get(path, [{"paused": False, "pinned": True}, {}] if method == "PATCH" else [{}]):
                answer = ask(live, method, path, body)
                assert answer.status_code < 500 or answer.status_code in (501, 503), f"{method} {path}: {answer.text}"
    live.client.post("/pause", params={"mode": "keep"})
    live.client.post("/resume")


@pytest.mark.wide
def test_no_route_asks_the_disk_on_the_event_loop(serve, reference, tmp_path, monkeypatch):
    live = serve(record=tmp_path / "record.json", adapter_source=(f"sources/*={tmp_path / 'root'}/*",))
    ask_all(live, reference)  # modules are imported where they are needed first
    with watching(monkeypatch) as calls:
        calls.loops.add(loop_thread(live))
        ask_all(live, reference)
        live.client.post("/v1/completions", content=b"{", headers=JSON)
        time.sleep(1.0)  # sweeps of connections
    assert not calls.found, "\n\n".join(sorted(set(calls.found)))


@pytest.fixture
def hanging(monkeypatch):
    """Once set, every look at the disk of uploads hangs until it is cleared."""
    hangs, go_on = threading.Event(), threading.Event()
    for kind, name in (
        (ContentStore, "draft"),
        (ContentStore, "directories"),
        (StagedUpload, "write"),
        (StagedUpload, "end"),
    ):
        plain = getattr(kind, name)

        def slow(*arguments, plain=plain, **named):
            if hangs.is_set():
                go_on.wait(120)
            return plain(*arguments, **named)

        monkeypatch.setattr(kind, name, slow)
    yield hangs
    hangs.clear()
    go_on.set()


@pytest.mark.wide
def test_a_disk_of_uploads_that_hangs_holds_up_nothing_else(serve, reference, hanging):
    live = serve(adapter_load_seconds=1.0)
    assert live.client.post("/v1/load_lora_adapter", **form(reference.adapters["r2-qv"])).status_code == 200
    hanging.set()
    answers = []

    def upload(name):
        answers.append(live.client.post("/v1/load_lora_adapter", **form(reference.adapters["r3-mlp"], name)))

    threads = [threading.Thread(target=upload, args=(f"n{number}",)) for number in range(6)]
    for thread in threads:
        thread.start()
    worst, end = 0.0, time.monotonic() + 3
    while time.monotonic() < end:
        began = time.monotonic()
        assert live.client.get("/ping").status_code == 200
        assert live.post(model=NAME, prompt=[5], max_tokens=1).status_code == 200
        worst = max(worst, time.monotonic() - began)
    for thread in threads:
        thread.join(60)
    assert worst < 1.0, "nothing waited for the disk"
    assert [answer.status_code for answer in answers] == [504] * 6, answers[0].text
    assert {answer.json()["error"]["code"] for answer in answers} == {"load_timed_out"}
    assert live.post("/v1/adapters", name="beside", path="one").status_code == 201, "another disk is not held up"


def test_uploads_look_at_the_new_files_alone(serve, reference, monkeypatch):
    """During many uploads a form costs the same as during few: the bytes in use are counted, not looked up."""
    live = serve()
    looks = []
    for name in ("iterdir", "glob"):
        plain = getattr(Path, name)
        monkeypatch.setattr(Path, name, lambda self, *given, plain=plain: looks.append(self) or plain(self, *given))
    for _ in range(20):
        empty = live.client.post("/v1/load_lora_adapter", data={"lora_name": "x"}, files={"y": ("y", b"")})
        assert empty.status_code == 400
    assert len(looks) < 10, "the health checker's turns look, requests don't"
