"""Adapters that are not registered: a rule says where one that a request names is, and it is fetched and kept."""

import gzip
import json
import logging
import os
import shutil
import tarfile
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import httpx
import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.engine.sourced_adapters import FETCH_THREADS
from tests.server.stores.store_server import hang, send, store_server

COUNT = 6
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def store():
    with store_server() as server:
        yield server


@pytest.fixture
def live(start, reference, store, tmp_path):
    """A server with rules for a web server and a directory, and keys if asked for."""

    def begin(keys=None, rules=None, **settings):
        if keys is not None:
            (tmp_path / "keys").write_text(keys)
            settings["api_key_file"] = tmp_path / "keys"
        for name in ("roots", "elsewhere"):
            (tmp_path / name).mkdir(exist_ok=True)
        rules = rules or [f"acme/*={store.url}/acme/*", f"dir/*={tmp_path}/roots/*", f"out/*={tmp_path}/elsewhere/*"]
        usual = {"adapter_source": rules, "adapter_source_hosts": [store.url], "adapter_cache": tmp_path / "cache"}
        config = EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
        return start(Engine.from_config(config), adapter_roots=(tmp_path / "roots",), settings={**usual, **settings})

    return begin


def offer(store, reference, adapter, name):
    """Put an adapter into the store."""
    for file in (CONFIG, WEIGHTS):
        store.paths[f"/acme/{name}/{file}"] = (reference.adapters[adapter] / file).read_bytes()


def asked(store, name):
    return store.asked[f"/acme/{name}/{WEIGHTS}"]


def ask(live, name, prompt=(5, 6, 7), key=None):
    body = {"model": name, "prompt": list(prompt), "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return live.client.post("/v1/completions", json=body | {"return_token_ids": True}, headers=headers)


def says(live, name, reference, adapter):
    """True if the model `name` answers as the reference's `adapter` does."""
    prompt = reference.prompt(adapter, 9, COUNT, 3)
    response = ask(live, name, prompt)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"] == reference.greedy(adapter, prompt, COUNT)


def error_of(response, status):
    assert response.status_code == status, response.text
    return response.json()["error"]


def names(live):
    return [one["name"] for one in live.client.get("/v1/adapters").json()["data"]]


def test_an_adapter_comes_when_it_is_named_and_is_fetched_once(live, store, reference, tmp_path):
    server = live()
    offer(store, reference, "r3-mlp", "one")
    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: ask(server, "acme/one").status_code, range(8)))
    assert answers == [200] * 8
    assert asked(store, "one") == 1
    assert says(server, "acme/one", reference, "r3-mlp")
    assert names(server) == ["acme/one"]
    assert [one["id"] for one in server.client.get("/v1/models").json()["data"]][1:] == ["acme/one"]
    store.paths.clear()
    assert says(live(), "acme/one", reference, "r3-mlp"), "another process finds it in the cache"
    assert asked(store, "one") == 1


def test_names_without_a_rule_or_an_adapter_are_unknown(live, store):
    server = live()
    for name in ("acme/none", "other", "acme/../x", "dir/none"):
        assert error_of(ask(server, name), 404)["code"] == "model_not_found"
    count = store.asked.total()
    assert count == 1
    assert ask(server, "acme/none").status_code == 404
    assert store.asked.total() == count, "it is not asked again at once"


def test_an_adapter_of_a_directory_lies_below_the_roots(live, reference, tmp_path):
    server = live()
    for parent in ("roots", "elsewhere"):
        shutil.copytree(reference.adapters["r2-qv"], tmp_path / parent / "one")
    assert says(server, "dir/one", reference, "r2-qv")
    error = error_of(ask(server, "out/one"), 424)
    assert "outside" in error["message"]
    assert str(tmp_path) not in error["message"]


def sparse_archive():
    """As `tarfile` can't read it: a map of a member's holes that goes on to the end."""
    info = tarfile.TarInfo("hole")
    info.type = tarfile.GNUTYPE_SPARSE
    header = bytearray(info.tobuf(tarfile.GNU_FORMAT))
    header[482] = 1
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return gzip.compress(bytes(header) + b"\1" * 512 * 2048)


@pytest.mark.parametrize("name", ["sparse.tar.gz", "cut.zip", "library"])
def test_what_no_library_can_read_is_refused_and_remembered(live, store, reference, monkeypatch, name):
    archives = {"sparse.tar.gz": sparse_archive(), "cut.zip": b"PK\5\6" + bytes(14)}
    offer(store, reference, "r3-mlp", name)
    if name in archives:
        store.paths[f"/acme/{name}"] = archives[name]
    else:

        def fails(*_):
            store.asked["failed"] += 1
            raise KeyError("size")

        monkeypatch.setattr("chorus.server.engine.sourced_adapters.download", fails)
    server = live()
    for _ in range(3):
        error = error_of(ask(server, f"acme/{name}"), 424)
        assert "is not served: its" in error["message"]
    assert store.asked.total() == 1, "it is fetched anew"


def test_without_rules_nothing_is_fetched(live, store, reference, tmp_path):
    server = live(adapter_source=[])
    offer(store, reference, "r3-mlp", "one")
    assert ask(server, "acme/one").status_code == 404
    assert not store.asked
    assert not (tmp_path / "cache").exists()


def test_a_host_that_is_not_listed_is_not_asked(live, store, reference, caplog):
    server = live(adapter_source_hosts=[])
    offer(store, reference, "r3-mlp", "one")
    error = error_of(ask(server, "acme/one"), 424)
    assert store.host not in error["message"]
    assert f"{store.host} is not in adapter_source_hosts" in caplog.text
    assert not store.asked


def test_a_key_without_the_right_has_nothing_fetched(live, store, reference):
    server = live("sk-tenant-one one adapters=acme/one\nsk-tenant-two two adapters=acme/two\n")
    for name in ("one", "two"):
        offer(store, reference, "r2-qv", name)
    theirs = error_of(ask(server, "acme/one", key="sk-tenant-two"), 404)
    assert theirs == error_of(ask(server, "acme/x/y", key="sk-tenant-two"), 404) | {"message": theirs["message"]}
    assert not store.asked
    assert ask(server, "acme/one", key="sk-tenant-one").status_code == 200
    listed = server.client.get("/v1/models", headers={"authorization": "Bearer sk-tenant-two"})
    assert "acme/one" not in listed.text


def test_a_broken_adapter_says_why_at_once_and_comes_when_it_is_mended(
    live, store, reference, monkeypatch, caplog, tmp_path
):
    clock = [1000.0]
    monkeypatch.setattr("chorus.server.engine.sourced_adapters.time", SimpleNamespace(monotonic=lambda: clock[0]))
    server = live()
    offer(store, reference, "r3-mlp", "one")
    good = store.paths[f"/acme/one/{CONFIG}"]
    store.paths[f"/acme/one/{CONFIG}"] = json.dumps(json.loads(good) | {"r": 99}).encode()
    for _ in range(3):
        error = error_of(ask(server, "acme/one"), 424)
        assert error["code"] == "adapter_quarantined"
        assert "rank" in error["message"]
    assert asked(store, "one") == 1
    assert caplog.text.count("acme/one of") == 1
    store.paths[f"/acme/one/{CONFIG}"] = good
    server.wait_until(lambda: not list((tmp_path / "cache").rglob("index/*")))  # what was refused is forgotten
    clock[0] += 9
    assert ask(server, "acme/one").status_code == 424
    clock[0] += 2
    assert says(server, "acme/one", reference, "r3-mlp")


@pytest.mark.wide
def test_what_a_fetched_adapter_becomes_is_limited_and_an_operators_own_is_not(live, store, reference, tmp_path):
    """LoKr's small factors become matrices of LoRA that are many times as large."""
    from peft import LoKrConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    targets = ["q_proj", "o_proj", "up_proj", "down_proj"]
    lokr = LoKrConfig(r=2, alpha=3, target_modules=targets, task_type="CAUSAL_LM", init_weights=False)
    found = tmp_path / "roots" / "lokr"
    get_peft_model(AutoModelForCausalLM.from_pretrained(reference.model), lokr).save_pretrained(found)
    files = {file: (found / file).read_bytes() for file in (CONFIG, WEIGHTS)}
    store.paths.update({f"/acme/lokr/{file}": data for file, data in files.items()})
    most = 2 * sum(map(len, files.values()))
    server = live(adapter_source_bytes=most)
    error = error_of(ask(server, "acme/lokr"), 424)
    assert f"bytes of LoRA, and {most} are allowed" in error["message"] and "adapter_source_bytes" in error["message"]
    assert ask(server, "dir/lokr").status_code == 200
    assert ask(live(), "acme/lokr").status_code == 200


def test_the_pause_grows_with_every_failure(live, store, monkeypatch):
    clock = [1000.0]
    monkeypatch.setattr("chorus.server.engine.sourced_adapters.time", SimpleNamespace(monotonic=lambda: clock[0]))
    server = live()
    store.paths[f"/acme/one/{CONFIG}"] = lambda handler: handler.send_error(500)
    waits = []
    for _ in range(9):
        response = ask(server, "acme/one")
        assert error_of(response, 503)["code"] == "adapter_source_unavailable"
        waits.append(int(response.headers["retry-after"]))
        clock[0] += waits[-1]
    assert waits == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    assert store.asked.total() == 9


@pytest.mark.wide
def test_a_hundred_hung_reads_slow_neither_the_base_model_nor_another_store(live, store, reference, monkeypatch):
    for module in ("deadline", "guarded_http"):
        monkeypatch.setattr(f"chorus.server.stores.{module}.SILENT_SECONDS", 3600.0)
    with store_server() as other:
        rules = [f"acme/*={store.url}/acme/*", f"other/*={other.url}/acme/*"]
        server = live(rules=rules, adapter_source_hosts=[store.url, other.url], adapter_source_seconds=3600)
        offer(other, reference, "r2-qv", "fine")
        for index in range(100):
            store.paths[f"/acme/hung{index}/{CONFIG}"] = hang
        limits = httpx.Limits(max_connections=None)
        with httpx.Client(base_url=server.url, limits=limits, timeout=60) as client, ThreadPoolExecutor(100) as threads:
            ask_one = partial(client.post, "/v1/completions")
            bodies = [{"model": f"acme/hung{index}", "prompt": [5]} for index in range(100)]
            hung = [threads.submit(ask_one, json=body) for body in bodies]
            server.wait_until(lambda: store.asked.total() >= FETCH_THREADS, 30)
            assert ask(server, "base").status_code == 200
            assert says(server, "other/fine", reference, "r2-qv")
            assert store.asked.total() == FETCH_THREADS
            assert not any(one.done() for one in hung)
            store.paths.clear()
            store.over.set()
            assert {one.result().status_code for one in hung} == {404, 503}


def test_clients_that_leave_lose_nothing_for_others(live, store, reference):
    server, go_on = live(), threading.Event()
    offer(store, reference, "r2-qv", "one")
    config = store.paths[f"/acme/one/{CONFIG}"]

    def late(handler):
        go_on.wait(20)
        send(handler, config)

    store.paths[f"/acme/one/{CONFIG}"] = late
    with pytest.raises(httpx.ReadTimeout):
        server.client.post("/v1/completions", json={"model": "acme/one", "prompt": [5]}, timeout=0.3)
    go_on.set()
    assert says(server, "acme/one", reference, "r2-qv")
    assert asked(store, "one") == 1


def test_a_removed_adapter_is_fetched_anew(live, store, reference, tmp_path):
    server = live()
    offer(store, reference, "r2-qv", "one")
    assert says(server, "acme/one", reference, "r2-qv")
    offer(store, reference, "r3-mlp", "one")
    assert says(server, "acme/one", reference, "r2-qv"), "what is served stays as it is"
    assert server.client.delete("/v1/adapters/acme/one").status_code == 200
    server.wait_until(lambda: not list(tmp_path.glob("cache/index/*.json")))
    assert says(server, "acme/one", reference, "r3-mlp")
    assert asked(store, "one") == 2


def test_the_least_recently_used_adapter_makes_room(live, store, reference, tmp_path):
    for name in ("a", "b", "c"):
        offer(store, reference, "r16-down", name)
        config = json.loads(store.paths[f"/acme/{name}/{CONFIG}"])
        store.paths[f"/acme/{name}/{CONFIG}"] = json.dumps(config | {"revision": name}).encode()  # contents differ
    size = sum(len(body) for path, body in store.paths.items() if "/a/" in path)
    server = live(adapter_cache_bytes=2 * size + size // 2)
    for name in ("a", "b"):
        assert says(server, f"acme/{name}", reference, "r16-down")
    for entry in (tmp_path / "cache" / "index").iterdir():
        used = 1000 + ("acme/b" in entry.read_text())
        os.utime(entry, (used, used))
    assert says(server, "acme/c", reference, "r16-down")
    assert names(server) == ["acme/b", "acme/c"]
    assert len([one for one in (tmp_path / "cache").iterdir() if len(one.name) == 64]) == 2
    assert says(server, "acme/a", reference, "r16-down")
    assert (asked(store, "a"), asked(store, "b"), asked(store, "c")) == (2, 1, 1)


def test_an_adapter_larger_than_the_cache_is_not_kept(live, store, reference, tmp_path, caplog):
    offer(store, reference, "r16-down", "a")
    server = live(adapter_cache_bytes=100)
    with caplog.at_level(logging.WARNING):
        assert "adapter_cache_bytes" in error_of(ask(server, "acme/a"), 503)["message"]
    assert not [one for one in (tmp_path / "cache").iterdir() if len(one.name) == 64]
