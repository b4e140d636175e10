"""Adapters come, are replaced and go over HTTP while a real engine serves a tiny model."""

import asyncio
import json
import shutil
import threading

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.merging.dlora import INITIAL_CREDIT
from chorus.memory.adapters.reclaimer import Reclaimer

pytestmark = pytest.mark.wide

COUNT = 6
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def root(tmp_path, reference):
    """A directory of adapters, two of them registered by nobody yet, one broken in its weights only."""
    for name in ("r2-qv", "r3-mlp", "r8-attention"):
        shutil.copytree(reference.adapters[name], tmp_path / "root" / name)
    broken = tmp_path / "root" / "broken"
    shutil.copytree(reference.adapters["r2-qv"], broken)
    weights = load_file(broken / WEIGHTS)
    next(iter(weights.values())).view(-1)[0] = torch.nan
    save_file(weights, broken / WEIGHTS)
    return tmp_path / "root"


@pytest.fixture
def live(start, reference, root):
    engine = Engine.from_config(
        EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    )
    engine.store.register("first", root / "r2-qv")
    return start(engine, adapter_roots=(root,))


def test_the_mode_of_the_weights_is_listed(start, reference):
    settings = {"memory_bytes": 32 << 20, "threads": 1, "mode_policy": "dlora-3"}
    config = EngineConfig(model=reference.model, adapters=reference.adapters["r3-mlp"].parent, **settings)
    live = start(Engine.from_config(config), settings={"mode_policy": "dlora-3"})
    nothing_yet = {"mode": "lora", "merged_adapter": None, "merges": 0, "switches": 0}
    before = live.client.get("/v1/adapters").json()
    assert before["weights"] == {"mode_policy": "dlora-3", **nothing_yet}
    assert {one["credit"] for one in before["data"]} == {INITIAL_CREDIT}
    body = {"model": "r3-mlp", "prompt": [5, 6, 7], "max_tokens": 40, "ignore_eos": True, "temperature": 0}
    assert live.post(**body).status_code == 200
    after = live.client.get("/v1/adapters").json()["weights"]
    assert (after["merges"], after["switches"] > 0) == (1, True)


def load(live, name, path, **more):
    return live.post("/v1/load_lora_adapter", lora_name=name, lora_path=str(path), **more)


def says(live, name, reference, adapter, length=9):
    """True if the model `name` answers as the reference's `adapter` does."""
    prompt = reference.prompt(adapter, length, COUNT, 3)
    body = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    response = live.post(model=name, prompt=prompt, **body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"] == reference.greedy(adapter, prompt, COUNT)


def error_of(response, status):
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error["param"], error["code"]


@pytest.mark.wide
def test_an_adapter_comes_and_goes_as_in_vllm(live, reference, root):
    response = load(live, "org/new", root / "r3-mlp", base_model_name="base")
    assert response.status_code == 200
    assert response.text == "Success: LoRA adapter 'org/new' added successfully."
    assert says(live, "org/new", reference, "r3-mlp")
    assert [card["id"] for card in live.client.get("/v1/models").json()["data"]] == ["base", "first", "org/new"]
    assert live.client.get("/v1/models/org/new").json()["root"] == "r3-mlp"
    response = live.post("/v1/unload_lora_adapter", lora_name="org/new", lora_int_id=None)
    assert response.text == "Success: LoRA adapter 'org/new' removed successfully." and response.status_code == 200
    assert live.post(model="org/new", prompt=[5]).status_code == 404
    response = live.post("/v1/unload_lora_adapter", lora_name="org/new")
    assert error_of(response, 404) == ("lora_name", "adapter_not_found")


def test_an_empty_name_of_the_base_is_none(live, root):
    """As the inference extension's sidecar sends it."""
    assert load(live, "org/new", root / "r3-mlp", base_model_name="").status_code == 200
    assert error_of(load(live, "org/newer", root / "r3-mlp", base_model_name=" "), 400)[0] == "base_model_name"


def test_a_loaded_adapter_is_replaced_only_when_asked(live, reference, root):
    assert error_of(load(live, "first", root / "r3-mlp"), 400) == ("lora_name", "adapter_already_loaded")
    assert says(live, "first", reference, "r2-qv")
    assert load(live, "first", root / "r3-mlp", load_inplace=True).status_code == 200
    assert says(live, "first", reference, "r3-mlp") and not says(live, "first", reference, "r2-qv")


@pytest.mark.parametrize("load_inplace", [False, True])
def test_what_cannot_be_loaded_changes_nothing(live, reference, root, load_inplace):
    name = "first" if load_inplace else "new"
    (root / "empty").mkdir()
    shutil.copytree(root / "r2-qv", root / "cut")
    (root / "cut" / WEIGHTS).write_bytes((root / "cut" / WEIGHTS).read_bytes()[:-8])
    for path, status, code in (
        (root / "missing", 404, "adapter_not_found"),
        ("missing", 404, "adapter_not_found"),
        (root / "r2-qv" / WEIGHTS, 404, "adapter_not_found"),
        (root / "empty", 400, "invalid_adapter"),
        (root / "cut", 400, "invalid_adapter"),
        (root / "broken", 400, "invalid_adapter"),
    ):
        assert error_of(load(live, name, path, load_inplace=load_inplace), status) == ("lora_path", code), path
    assert live.client.get("/v1/adapters/first").json()["version"] == 1
    assert [one["name"] for one in live.client.get("/v1/adapters").json()["data"]] == ["first"]
    assert says(live, "first", reference, "r2-qv")


def test_only_what_lies_below_the_roots_is_loaded(live, reference, root, tmp_path):
    (root / "link").symlink_to(reference.adapters["r2-qv"])
    (root / "inner").symlink_to(root / "r3-mlp")
    outside = [reference.adapters["r2-qv"], "/nowhere", "/", "../elsewhere", root / ".." / "x", tmp_path, root / "link"]
    for path in outside:
        assert error_of(load(live, "new", path), 403) == ("lora_path", "path_not_allowed"), path
    for path in ("\0", "x" * 5000):
        assert error_of(load(live, "new", path), 400)[0] == "lora_path"
    for path in ("r3-mlp", "./r3-mlp/", root / "inner", root / "x" / ".." / "r3-mlp"):
        assert load(live, "new", path, load_inplace=True).status_code == 200, path
    assert live.client.get("/v1/adapters/new").json()["path"] == str(root / "r3-mlp")


@pytest.mark.parametrize("name", ["", "base", " x", "x\n", "a\x00", "..", "a//b", "/a", "a/", "é" * 257, "\u200b"])
def test_names_that_are_refused(live, name):
    assert error_of(load(live, name, "r3-mlp"), 400)[0] == "lora_name"
    assert error_of(live.post("/v1/adapters", name=name, path="r3-mlp"), 400)[0] == "name"


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("load_lora_adapter", {"lora_path": "x"}, "lora_name"),
        ("load_lora_adapter", {"lora_name": "x"}, "lora_path"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": ""}, "lora_path"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "r3-mlp", "load_inplace": "so"}, "load_inplace"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "r3-mlp", "base_model_name": "y"}, "base_model_name"),
        ("unload_lora_adapter", {}, "lora_name"),
        ("unload_lora_adapter", {"lora_name": "first", "lora_int_id": 3}, "lora_int_id"),
        ("adapters", {"name": "x"}, "path"),
        ("adapters", {"name": "x", "path": "r3-mlp", "pinned": True}, "pinned"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "r3-mlp", "lora_alpha": 4}, "lora_alpha"),
        ("adapters/first/drain", {"timeout": 3}, "timeout"),
    ],
)
def test_fields_that_are_refused(live, path, body, field):
    assert error_of(live.post(f"/v1/{path}", **body), 400)[0] == field


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("load_lora_adapter", {"name": "x", "path": "r3-mlp"}, "there is no field 'name'; did you mean lora_name?"),
        ("load_lora_adapter", {"lora_name": "x", "path": "r3-mlp"}, "did you mean lora_path?"),
        ("load_lora_adapter", {"lora_name": "x", "lora_pth": "r3-mlp"}, "did you mean lora_path?"),
        (
            "load_lora_adapter",
            {"lora_name": "x", "lora_path": "r3-mlp", "lora_int_id": 1},
            "have names here, no numbers",
        ),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "r3-mlp", "pinned": True}, "PATCH /v1/adapters/NAME"),
        ("load_lora_adapter", {"lora_name": "x", "lora_path": "r3-mlp", "rank": 4}, "adapter_config.json says it"),
        ("adapters", {"lora_name": "x", "lora_path": "r3-mlp"}, "did you mean name?"),
        ("adapters/first/drain", {"name": "first"}, "the route's path has the adapter's name"),
        ("adapters/first/drain", {"xyzzy": 1}, "the fields are seconds"),
    ],
)
def test_a_field_that_a_route_lacks_is_answered_by_the_right_one(live, path, body, said):
    assert said in live.post(f"/v1/{path}", **body).json()["error"]["message"]


def test_our_own_routes(live, reference, root):
    response = live.post("/v1/adapters", name="a/b", path="r8-attention")
    assert response.status_code == 201
    assert says(live, "a/b", reference, "r8-attention")
    body = live.client.get("/v1/adapters/a/b").json()
    assert body == {
        "name": "a/b",
        "version": 1,
        "rank": 8,
        "num_labels": None,
        "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "tier": "device",
        "pages": body["pages"],
        "references": 0,
        "pinned": False,
        "paused": False,
        "credit": None,
        "path": str(root / "r8-attention"),
        "content_hash": body["content_hash"],
        "no_effect": False,
        "dropped_tensors": [],
        "stem": None,
        "base_model": body["base_model"],
        "names_other_base": False,
    }
    assert body["pages"] > 0
    listed = live.client.get("/v1/adapters").json()
    assert listed["object"] == "list" and listed["data"][0] | {"content_hash": body["content_hash"]} == body
    assert listed["data"][1]["name"] == "first" and listed["data"][1]["tier"] == "disk"
    response = live.post("/v1/adapters", name="a/b", path="r3-mlp")
    assert response.status_code == 200 and response.json()["version"] == 2
    assert says(live, "a/b", reference, "r3-mlp")
    deleted = live.client.delete("/v1/adapters/a/b")
    assert deleted.json() == {"object": "adapter", "name": "a/b", "deleted": True, "ended_requests": 0}
    for method in ("GET", "DELETE"):
        assert error_of(live.client.request(method, "/v1/adapters/a/b"), 404) == (None, "adapter_not_found")


def test_a_stream_finishes_with_the_version_it_began_with(live, reference, root):
    prompt = reference.prompt("r2-qv", 9, 60, 5)
    body = {"model": "first", "prompt": prompt, "max_tokens": 60, "temperature": 0, "stream": True}
    tokens = []
    with live.client.stream(
        "POST", "/v1/completions", json={**body, "ignore_eos": True, "return_token_ids": True}
    ) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                tokens += json.loads(line[6:])["choices"][0]["token_ids"]
            if len(tokens) == 3 and line:
                httpx.delete(f"{live.url}/v1/adapters/first").raise_for_status()
    assert tokens == reference.greedy("r2-qv", prompt, 60)


def stream_until(live, body, at, then):
    """Stream an answer and call `then` when `at` tokens have come; the tokens, and the error if there is one.

    Steps take a tenth of a second until `then` is done, so that a slow client finds the request running.
    """
    tokens, error, called, done = [], None, False, threading.Event()
    execute = live.engine.executor.execute

    def slowly(plan):
        done.wait(0.1)
        return execute(plan)

    live.engine.executor.execute = slowly
    body = {"temperature": 0, "stream": True, "ignore_eos": True, "return_token_ids": True, **body}
    with live.client.stream("POST", "/v1/completions", json=body) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                error = event.get("error", error)
                tokens += event["choices"][0]["token_ids"] if event.get("choices") else []
            if len(tokens) >= at and not called:
                called = True
                then()
                done.set()
    return tokens, error


@pytest.mark.wide
def test_new_requests_get_the_new_version_while_a_running_one_finishes_on_the_old(live, reference, root):
    prompt = reference.prompt("r2-qv", 9, 60, 5)

    def reload():
        with httpx.Client(base_url=live.url, timeout=20) as client:
            client.post("/v1/adapters", json={"name": "first", "path": "r3-mlp"}).raise_for_status()
            ask = {"model": "first", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            answer = client.post("/v1/completions", json={**ask, "ignore_eos": True, "return_token_ids": True}).json()
            assert answer["choices"][0]["token_ids"] == reference.greedy("r3-mlp", prompt, 4)

    tokens, error = stream_until(live, {"model": "first", "prompt": prompt, "max_tokens": 60}, 3, reload)
    assert (tokens, error) == (reference.greedy("r2-qv", prompt, 60), None)


def test_an_adapter_is_unloaded_at_once_by_force(live, reference):
    prompt = reference.prompt("r2-qv", 9, 60, 5)

    def unload():
        deleted = httpx.delete(f"{live.url}/v1/adapters/first?force=true")
        assert deleted.json() == {"object": "adapter", "name": "first", "deleted": True, "ended_requests": 1}

    tokens, error = stream_until(live, {"model": "first", "prompt": prompt, "max_tokens": 60}, 3, unload)
    assert len(tokens) < 60 and tokens == reference.greedy("r2-qv", prompt, 60)[: len(tokens)]
    assert error is not None
    assert error["code"] == "adapter_removed" and "'first' was removed" in error["message"]
    assert live.engine.stats().num_adapter_pages == 0
    assert live.post(model="base", prompt=[5, 6], max_tokens=2).status_code == 200
    assert error_of(live.client.delete("/v1/adapters/first?force=true"), 404) == (None, "adapter_not_found")
    assert error_of(live.client.delete("/v1/adapters/first?force=now"), 400)[0] == "force"
    assert error_of(live.post("/v1/unload_lora_adapter", lora_name="first", force=True), 404)[0] == "lora_name"


class TestPins:
    def pin(self, live, name, pinned):
        return live.client.patch(f"/v1/adapters/{name}", json={"pinned": pinned})

    def test_a_pinned_adapter_stays_resident(self, live):
        body = self.pin(live, "first", True).json()
        assert (body["pinned"], body["tier"], body["references"]) == (True, "device", 0)
        assert live.client.get("/v1/adapters").json()["data"][0]["pinned"]
        assert 'chorus_adapter_pinned{adapter="first"} 1.0' in live.client.get("/metrics").text
        live.engine.reclaimer.reclaim_all()
        assert live.client.get("/v1/adapters/first").json()["tier"] == "device"
        assert not self.pin(live, "first", False).json()["pinned"]
        live.engine.reclaimer.reclaim_all()
        assert live.client.get("/v1/adapters/first").json()["pages"] == 0

    def test_a_new_version_of_a_pinned_adapter_is_pinned(self, live, reference):
        self.pin(live, "first", True).raise_for_status()
        body = live.post("/v1/adapters", name="first", path="r3-mlp").json()
        assert (body["pinned"], body["tier"], body["version"]) == (True, "device", 2)
        assert says(live, "first", reference, "r3-mlp")
        assert live.client.delete("/v1/adapters/first").status_code == 200
        assert live.engine.stats().num_adapter_pages == 0

    def test_what_cannot_be_pinned(self, live, monkeypatch):
        assert error_of(self.pin(live, "nobody", True), 404) == (None, "adapter_not_found")
        assert error_of(self.pin(live, "nobody", False), 404) == (None, "adapter_not_found")
        assert error_of(self.pin(live, "first", "yes"), 400)[0] == "pinned"
        monkeypatch.setattr(type(live.engine.store.pins), "num_pages", 1 << 20)
        assert error_of(self.pin(live, "first", True), 400) == ("pinned", "no_room_to_pin")

    def test_what_cannot_be_pinned_at_the_moment_is_to_be_asked_again(self, live, monkeypatch):
        monkeypatch.setattr(Reclaimer, "make_room", lambda *_: False)
        refused = self.pin(live, "first", True)
        assert error_of(refused, 503)[1] == "pages_in_use" and refused.headers["retry-after"] == "1"
        assert "unpin" not in refused.json()["error"]["message"]

    def test_bodies_that_are_no_json_are_refused(self, live):
        response = live.client.patch("/v1/adapters/first", content="pinned=true")
        assert response.status_code == 415


def test_loads_of_one_name_at_once(live, reference):
    async def main():
        async with httpx.AsyncClient(base_url=live.url, timeout=20) as client:
            body = {"lora_name": "new", "lora_path": "r3-mlp"}
            responses = await asyncio.gather(*(client.post("/v1/load_lora_adapter", json=body) for _ in range(5)))
            assert sorted(response.status_code for response in responses) == [200, 400, 400, 400, 400]

    asyncio.run(main())
    assert says(live, "new", reference, "r3-mlp")


def test_steps_go_on_while_an_adapter_is_checked(live, root, monkeypatch):
    checking, go_on = threading.Event(), threading.Event()
    check = live.engine.adapters.check

    def slow(path, roots, image, **limits):
        checking.set()
        assert go_on.wait(10)
        return check(path, roots, image, **limits)

    monkeypatch.setattr(live.engine.adapters, "check", slow)
    loading = threading.Thread(target=load, args=(live, "new", root / "r3-mlp"))
    loading.start()
    assert checking.wait(10)
    assert live.post(model="first", prompt=[5, 6], max_tokens=4).status_code == 200
    assert live.client.get("/v1/adapters/new").status_code == 404
    go_on.set()
    loading.join(10)
    assert live.client.get("/v1/adapters/new").status_code == 200


def test_a_file_that_changes_while_it_is_checked(live, reference, root, monkeypatch):
    check = live.engine.adapters.check

    def and_then_change(path, roots, image, **limits):
        manifest = check(path, roots, image, **limits)
        shutil.copy(reference.adapters["r8-attention"] / WEIGHTS, path / WEIGHTS)
        return manifest

    monkeypatch.setattr(live.engine.adapters, "check", and_then_change)
    response = load(live, "first", root / "r3-mlp", load_inplace=True)
    assert error_of(response, 400) == ("lora_path", "invalid_adapter") and "changed" in response.text
    assert says(live, "first", reference, "r2-qv")


def test_without_roots_nothing_changes(start, fake_engine):
    live = start(fake_engine)
    requests = (
        load(live, "new", "/"),
        live.post("/v1/unload_lora_adapter", lora_name="alice"),
        live.post("/v1/adapters", name="new", path="/"),
        live.client.delete("/v1/adapters/alice"),
    )
    for response in requests:
        assert error_of(response, 403)[1] == "adapter_loading_disabled"
        assert "adapter_roots" in response.json()["error"]["message"]
    assert [one["name"] for one in live.client.get("/v1/adapters").json()["data"]] == ["alice", "bob"]


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/adapters"),
        ("PATCH", "/v1/adapters/alice"),
        ("POST", "/v1/adapters/alice/drain"),
        ("POST", "/v1/load_lora_adapter"),
        ("POST", "/v1/unload_lora_adapter"),
        ("POST", "/skyrl/v1/load_lora_adapter"),
    ],
)
def test_fields_in_the_query_of_a_route_that_reads_a_body_are_refused(shared, method, path):
    answer = shared.client.request(method, f"{path}?force=true", json={"lora_name": "alice"})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "force" and "give the fields in the body" in error["message"]
    assert shared.client.get("/v1/adapters/alice").status_code == 200
