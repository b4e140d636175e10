"""Adapters and requests for them that could keep a server from everybody else."""

from __future__ import annotations

import json
import os
import shutil
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.engine.worker import EngineWorker
from chorus.server.errors import EngineUnavailable

pytestmark = pytest.mark.wide

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
ANSWER_SECONDS = 60


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def root(tmp_path, reference):
    for name in ("r2-qv", "r3-mlp"):
        shutil.copytree(reference.adapters[name], tmp_path / "root" / name)
    return tmp_path / "root"


@pytest.fixture
def make_live(start, reference, root, monkeypatch):
    monkeypatch.setattr("chorus.server.engine.adapter_health.TURN_SECONDS", 0.05)

    def make(adapters=None, keys=None, **options):
        if keys is not None:
            (root.parent / "keys").write_bytes(keys)
        config = {"model": reference.model, "memory_bytes": 8 << 20, "threads": 1, "cpu_kernels": "torch"}
        engine = Engine.from_config(EngineConfig(adapters=adapters, **config))
        if adapters is None:
            engine.store.register("first", root / "r2-qv")
        return start(engine, adapter_roots=(root,), **options)

    return make


def add(live, name, path):
    return live.client.post("/v1/adapters", json={"name": name, "path": str(path)}, timeout=ANSWER_SECONDS)


def works(live):
    return live.post(model="first", prompt=[5, 6], max_tokens=3).status_code == 200


@pytest.mark.wide
def test_endless_paths_and_names_are_refused_before_anybody_looks_for_them(make_live, monkeypatch):
    live = make_live(max_body_bytes=4 << 20)
    looked_for = []
    monkeypatch.setattr("pathlib.Path.resolve", lambda path, *_: looked_for.append(path) or path)
    huge = "a/" * (1 << 20)
    for _ in range(20):
        response = add(live, "new", huge)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "path"
        assert len(response.content) < 1000
    assert add(live, "n" * (2 << 20), "r3-mlp").json()["error"]["param"] == "name"
    assert add(live, "new", "é" * 2049).json()["error"]["param"] == "path"  # 4,098 bytes
    for route, body, field in (
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": huge}, "lora_path"),
        ("/v1/load_lora_adapter", {"lora_name": huge, "lora_path": "x"}, "lora_name"),
        ("/v1/load_lora_adapter", {"lora_name": "x", "lora_path": "x", "base_model_name": huge}, "base_model_name"),
        ("/v1/unload_lora_adapter", {"lora_name": huge}, "lora_name"),
    ):
        response = live.post(route, **body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field
    assert not looked_for
    assert works(live)


@pytest.mark.wide
def test_a_disk_that_hangs_costs_the_load_and_nothing_else(make_live, monkeypatch, root):
    live = make_live(settings={"adapter_load_seconds": 0.2})
    go_on, stuck, plain_open = threading.Event(), [], os.open

    def hanging_open(path, *args, **options):
        if path == WEIGHTS and threading.current_thread().name.startswith("chorus-adapter-load"):
            stuck.append(path)
            assert go_on.wait(120)
        return plain_open(path, *args, **options)

    monkeypatch.setattr("chorus.memory.files.directory.os.open", hanging_open)
    try:
        for _ in range(8):
            response = add(live, "new", "r3-mlp")
            assert response.status_code == 504, response.text
            assert response.json()["error"]["code"] == "load_timed_out"
            assert works(live)
        for _ in range(3):
            response = add(live, "new", "r3-mlp")
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "loads_busy"
            assert response.json()["error"]["message"].count("try again later") == 1
        assert len(stuck) == 8
        assert works(live)
        assert live.client.delete("/v1/adapters/first").status_code == 200
    finally:
        go_on.set()
    deadline = time.monotonic() + ANSWER_SECONDS
    while add(live, "new", "r3-mlp").status_code != 201:  # the disk is back, and so are the threads
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_engines_thread_reads_no_file(make_live, monkeypatch, root):
    live = make_live()
    seen, plain = set(), {name: getattr(os, name) for name in ("open", "stat", "lstat", "fstat")}
    for name, function in plain.items():

        def watched(*args, _function=function, **options):
            seen.add(threading.current_thread().name)
            return _function(*args, **options)

        monkeypatch.setattr(os, name, watched)
    assert add(live, "new", "r3-mlp").status_code == 201
    assert add(live, "first", "r3-mlp").status_code == 200
    assert any(name.startswith("chorus-adapter-load") for name in seen)
    assert "chorus-engine" not in seen


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_a_linked_file_outside_of_the_roots_is_not_served(make_live, reference, root, name):
    live = make_live()
    shutil.copytree(root / "r3-mlp", root / "linked")
    (root / "linked" / name).unlink()
    (root / "linked" / name).symlink_to(reference.adapters["r3-mlp"] / name)
    response = add(live, "new", "linked")
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_adapter"
    assert "outside" in response.text


def test_what_cannot_fit_is_refused_before_its_weights_are_read(make_live, monkeypatch, reference, root):
    live = make_live()
    path = root / "huge"
    shutil.copytree(reference.adapters["r1-all"], path)
    config = json.loads((path / CONFIG).read_text())
    (path / CONFIG).write_text(json.dumps(config | {"r": 4096}))
    header, offset = {}, 0
    for key, tensor in load_file(path / WEIGHTS).items():
        shape = [4096 if size == 1 else size for size in tensor.shape]
        end = offset + 4 * shape[0] * shape[1]
        header[key] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    raw = json.dumps(header).encode()
    with (path / WEIGHTS).open("wb") as stream:
        stream.write(len(raw).to_bytes(8, "little") + raw)
        stream.truncate(8 + len(raw) + offset)
    monkeypatch.setattr(live.engine.executor.adapters, "read", None)
    response = add(live, "new", "huge")
    assert response.status_code == 400, response.text
    assert "pages of the pool" in response.text


def test_quarantine_is_listed_counted_and_left_when_the_directory_changes(make_live, reference, root):
    good = (root / "r3-mlp" / WEIGHTS).read_bytes()
    os.truncate(root / "r3-mlp" / WEIGHTS, len(good) - 5)
    shutil.copytree(root / "r2-qv", root / os.fsdecode(b"bad-\xff"))
    shutil.copytree(root / "r2-qv", root / "first")
    live = make_live(adapters=root)
    listed = live.client.get("/v1/adapters").json()
    assert [one["name"] for one in listed["data"]] == ["first", "r2-qv"]
    (bad, broken) = sorted(listed["quarantined"], key=lambda one: one["name"])
    assert (broken["name"], broken["path"]) == ("r3-mlp", str(root / "r3-mlp"))
    assert "cut off" in broken["reason"]
    assert bad["name"] == "'bad-\\udcff'"
    assert bad["path"].endswith("bad-\\udcff'")
    assert "chorus_adapters_quarantined 2.0" in live.client.get("/metrics").text
    assert "r3-mlp" not in live.client.get("/v1/models").text
    (root / "r3-mlp" / WEIGHTS).write_bytes(good[:-1])  # still being uploaded
    live.wait_until(lambda: f"byte {len(good)} of {len(good) - 1}" in live.client.get("/v1/adapters").text, 60)
    (root / "r3-mlp" / WEIGHTS).write_bytes(good)
    live.wait_until(lambda: live.client.get("/v1/adapters/r3-mlp").status_code == 200, 60)
    assert [one["name"] for one in live.client.get("/v1/adapters").json()["quarantined"]] == ["'bad-\\udcff'"]
    prompt = reference.prompt("r3-mlp", 9, 5, 3)
    body = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    tokens = live.post(model="r3-mlp", prompt=prompt, **body).json()["choices"][0]["token_ids"]
    assert tokens == reference.greedy("r3-mlp", prompt, 5)


def test_the_keeper_outlives_a_stall(make_live, root, monkeypatch):
    monkeypatch.setattr("chorus.server.engine.watchdog.POLL_SECONDS", 1e6)  # or it would see that nothing hangs
    good = (root / "r3-mlp" / WEIGHTS).read_bytes()
    os.truncate(root / "r3-mlp" / WEIGHTS, len(good) - 5)
    refused, call = [], EngineWorker.call

    def watched(worker, function):
        future = call(worker, function)
        if future.done() and isinstance(future.exception(), EngineUnavailable):
            refused.append(function)
        return future

    monkeypatch.setattr(EngineWorker, "call", watched)
    live = make_live(adapters=root)
    live.worker.stalled = "a step hangs"
    live.wait_until(lambda: refused, 60)
    live.worker.stalled = None
    (root / "r3-mlp" / WEIGHTS).write_bytes(good)
    live.wait_until(lambda: live.client.get("/v1/adapters/r3-mlp").status_code == 200, 60)


def test_a_load_takes_a_name_out_of_quarantine(make_live, root):
    (root / "r3-mlp" / WEIGHTS).unlink()
    live = make_live(adapters=root)
    assert [one["name"] for one in live.client.get("/v1/adapters").json()["quarantined"]] == ["r3-mlp"]
    assert add(live, "r3-mlp", "r2-qv").status_code == 201
    assert live.client.get("/v1/adapters").json()["quarantined"] == []


def test_every_adapter_gets_the_hash_of_its_content(make_live, root):
    shutil.copytree(root / "r2-qv", root / "first")
    zero = root / "zero"
    shutil.copytree(root / "r2-qv", zero)
    weights = load_file(zero / WEIGHTS)
    save_file({key: torch.zeros_like(t) if "lora_B" in key else t for key, t in weights.items()}, zero / WEIGHTS)
    live = make_live(adapters=root)

    def hashes():
        return {one["name"]: one["content_hash"] for one in live.client.get("/v1/adapters").json()["data"]}

    live.wait_until(lambda: all(hashes().values()), 60)
    found = hashes()
    assert found["first"] == found["r2-qv"]
    assert len(set(found.values())) == 3
    assert live.client.get("/v1/adapters/zero").json()["no_effect"] is True
    assert live.client.get("/v1/adapters/first").json()["no_effect"] is False
    added = add(live, "again", "r2-qv").json()
    assert added["no_effect"] is False
    live.wait_until(lambda: hashes()["again"] == found["first"], 60)
    assert add(live, "nothing", "zero").json()["no_effect"] is True


def quarantined(live):
    return {one["name"]: one["reason"] for one in live.client.get("/v1/adapters").json()["quarantined"]}


def test_weights_that_are_broken_are_found_in_the_background(make_live, reference, root):
    good = load_file(root / "r3-mlp" / WEIGHTS)
    last = list(good)[-1]
    save_file(good | {last: good[last] * torch.nan}, root / "r3-mlp" / WEIGHTS)
    shutil.copytree(root / "r2-qv", root / "first")
    live = make_live(adapters=root)
    live.wait_until(lambda: "r3-mlp" in quarantined(live), 60)
    assert "holds NaN" in quarantined(live)["r3-mlp"]
    assert works(live)
    assert live.client.get("/v1/adapters/r3-mlp").status_code == 404
    assert add(live, "r3-mlp", "r3-mlp").status_code == 400
    assert list(quarantined(live)) == ["r3-mlp"]
    save_file(good, root / "r3-mlp" / WEIGHTS)
    assert add(live, "r3-mlp", "r3-mlp").is_success
    assert quarantined(live) == {}
    prompt = reference.prompt("r3-mlp", 9, 5, 3)
    body = {"max_tokens": 5, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    tokens = live.post(model="r3-mlp", prompt=prompt, **body).json()["choices"][0]["token_ids"]
    assert tokens == reference.greedy("r3-mlp", prompt, 5)


@pytest.mark.parametrize("cut", [0, 7])
def test_a_file_that_changed_before_it_was_read_is_tried_as_it_is_by_now(make_live, monkeypatch, root, cut):
    """The weights change between the start and the background's first look at them."""
    shutil.copytree(root / "r2-qv", root / "first")
    first_look, changed = threading.Event(), threading.Event()
    check = EngineWorker.check_weights

    def later(self, manifest):
        first_look.set()
        assert changed.wait(60)
        return check(self, manifest)

    monkeypatch.setattr(EngineWorker, "check_weights", later)
    live = make_live(adapters=root)
    try:
        assert first_look.wait(60)
        weights = root / "r3-mlp" / WEIGHTS
        data = weights.read_bytes()
        weights.write_bytes(data[: len(data) - cut])
    finally:
        changed.set()
    if cut:
        live.wait_until(lambda: "cut off" in quarantined(live).get("r3-mlp", ""), 60)
    else:
        live.wait_until(lambda: live.client.get("/v1/adapters/r3-mlp").json().get("version", 0) > 1, 60)
        assert quarantined(live) == {}


@pytest.mark.wide
def test_what_was_mended_with_a_link_to_elsewhere_stays_in_quarantine(make_live, root, tmp_path):
    """It would not be loaded from there over HTTP, either."""
    good = tmp_path / "elsewhere"
    (root / "r3-mlp" / WEIGHTS).rename(good)
    shutil.copytree(root / "r2-qv", root / "first")
    live = make_live(adapters=root)
    assert "not found" in quarantined(live)["r3-mlp"]
    (root / "r3-mlp" / WEIGHTS).symlink_to(good)
    live.wait_until(lambda: "outside" in quarantined(live).get("r3-mlp", "outside"), 60)
    assert "outside" in quarantined(live)["r3-mlp"]
    assert works(live)


@pytest.mark.wide
def test_finite_weights_that_overflow_are_set_aside(make_live, root):
    weights = load_file(root / "r3-mlp" / WEIGHTS)
    save_file({name: tensor.float() * 1e30 for name, tensor in weights.items()}, root / "r3-mlp" / WEIGHTS)
    shutil.copytree(root / "r2-qv", root / "first")
    live = make_live(adapters=root)
    for _ in range(3):
        refused = live.post(model="r3-mlp", prompt=[5, 6], max_tokens=3)
        assert (refused.status_code, refused.json()["error"]["code"]) == (424, "adapter_overflows"), refused.text
    live.wait_until(lambda: "r3-mlp" in quarantined(live), 60)
    assert "not finite" in quarantined(live)["r3-mlp"]
    refused = live.post(model="r3-mlp", prompt=[5, 6], max_tokens=3)
    assert (refused.status_code, refused.json()["error"]["code"]) == (424, "adapter_quarantined")
    assert "not finite" in refused.json()["error"]["message"] and str(root) not in refused.text
    assert works(live)
    time.sleep(0.3)  # some turns of the health checker, which does not take it back while its files are the same
    assert "r3-mlp" in quarantined(live)
    save_file(weights, root / "r3-mlp" / WEIGHTS)
    live.wait_until(lambda: live.post(model="r3-mlp", prompt=[5, 6], max_tokens=3).status_code == 200, 60)


def test_no_request_takes_an_adapter_away_that_has_answered_before(make_live, root):
    live = make_live()
    assert works(live)
    adapter = live.worker.call(lambda engine: engine.store.get("first")).result(60)
    assert adapter.num_overflows is None


def test_tokens_of_which_none_may_be_drawn_are_refused(make_live):
    live = make_live()
    (end, *_), body = live.worker.model.eos_token_ids, {"model": "first", "prompt": [5, 6], "max_tokens": 3}
    for more in ({"min_tokens": 1, "allowed_token_ids": [end]}, {"allowed_token_ids": [7], "bad_words": []}):
        response = live.post(**body, **more)
        assert response.status_code == (400 if "min_tokens" in more else 200), response.text
    assert live.post(**body, min_tokens=1, allowed_token_ids=[end, 7]).status_code == 200
    response = live.post(**body, min_tokens=2, allowed_token_ids=[7], stop_token_ids=[7])
    assert response.status_code == 400 and response.json()["error"]["param"] == "allowed_token_ids"


@pytest.mark.wide
def test_a_slow_load_delays_no_other(make_live, monkeypatch, root):
    live = make_live(settings={"stall_seconds": 0.5})
    monkeypatch.setattr("chorus.server.engine.adapter_loader.SLOW_SECONDS", 0.05)
    go_on, slow, check = threading.Event(), threading.Event(), live.engine.adapters.check

    def checked(path, roots, image, **limits):
        if path.name == "r3-mlp":
            slow.set()
            assert go_on.wait(60)
        return check(path, roots, image, **limits)

    monkeypatch.setattr(live.engine.adapters, "check", checked)
    answers = {}
    loading = threading.Thread(target=lambda: answers.update(first=add(live, "slow", "r3-mlp")))
    loading.start()
    try:
        assert slow.wait(60)
        assert add(live, "quick", "r2-qv").status_code == 201
        following = threading.Thread(target=lambda: answers.update(second=add(live, "slow", "r2-qv")))
        following.start()
        time.sleep(1.5)  # of three looks of the watchdog
        assert not answers, "loads of one name follow each other"
        assert live.client.get("/health").status_code == 200 and works(live)
    finally:
        go_on.set()
    loading.join(60)
    following.join(60)
    assert {name: answer.status_code for name, answer in answers.items()} == {"first": 201, "second": 200}
    assert live.client.get("/v1/adapters/slow").json()["rank"] == 2


def test_changes_of_adapters_are_logged_with_their_callers(make_live, root, caplog):
    live = make_live(settings={"admin_key_file": root.parent / "keys"}, keys=b"sk-of-the-admin ops\n")
    live.client.headers["authorization"] = "Bearer sk-of-the-admin"
    with caplog.at_level("INFO", "chorus.audit"):
        added = add(live, "new", "r3-mlp").json()
        add(live, "new", "r2-qv")
        live.client.patch("/v1/adapters/new", json={"pinned": True})
        live.client.delete("/v1/adapters/new")
    lines = [record.getMessage() for record in caplog.records if record.name == "chorus.audit"]
    assert lines[0].startswith(f"ops added adapter new: version 1, content {added['content_hash']}, from ")
    assert lines[1].startswith("ops replaced adapter new: version 2, content ")
    assert lines[2] == "ops pinned adapter new"
    assert lines[3].startswith("ops removed adapter new: version 2, content ")
    assert len(added["content_hash"]) == 64 and "sk-of" not in caplog.text


def test_names_that_mean_another_adapter_are_refused(make_live, root):
    live = make_live()
    for name in ("base", "base:new"):
        response = add(live, name, "r3-mlp")
        assert response.status_code == 400 and response.json()["error"]["param"] == "name", response.text
    assert add(live, "based:new", "r3-mlp").status_code == 201
