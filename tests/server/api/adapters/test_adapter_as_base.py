"""An adapter that serves requests for the base model's name."""

from __future__ import annotations

import shutil

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.cluster.plan import ClusterPlan
from chorus.server.cluster.up import up
from chorus.server.engine.worker import EngineWorker
from chorus.server.settings import Settings
from chorus.server.start import launch

COUNT = 6


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def root(tmp_path, reference):
    for name in ("r2-qv", "r3-mlp", "r8-attention"):
        shutil.copytree(reference.adapters[name], tmp_path / "root" / name)
    return tmp_path / "root"


@pytest.fixture
def begin(start, reference, root):
    def begin(**options):
        settings = {"memory_bytes": 8 << 20, "threads": 1, "cpu_kernels": "torch"}
        engine = Engine.from_config(EngineConfig(model=reference.model, **settings))
        engine.store.register("first", root / "r2-qv")
        return start(engine, adapter_roots=(root,), **options)

    return begin


def answers(live, name, reference, headers=None):
    """Names of the reference's adapters that a model answers as."""
    found = []
    for adapter in (None, "r2-qv", "r3-mlp", "r8-attention"):
        prompt = reference.prompt(adapter, 9, COUNT, 3)
        body = {"max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        response = live.client.post("/v1/completions", json={**body, "model": name, "prompt": prompt}, headers=headers)
        assert response.status_code == 200, response.text
        if response.json()["choices"][0]["token_ids"] == reference.greedy(adapter, prompt, COUNT):
            found.append(adapter)
        assert response.json()["model"] == name
    return found


def listed(live):
    cards = {card["id"]: card.get("adapter") for card in live.client.get("/v1/models").json()["data"]}
    ours = [one["name"] for one in live.client.get("/v1/adapters").json()["data"] if one.get("as_base")]
    return cards["base"], ours


def load(live, name, path, **more):
    return live.post("/v1/load_lora_adapter", lora_name=name, lora_path=path, **more)


def test_a_load_serves_the_bases_name_until_the_unload(begin, reference):
    live = begin()
    assert answers(live, "base", reference) == [None]
    assert listed(live) == (None, [])
    assert load(live, "step", "r3-mlp", as_base=True).status_code == 200
    assert answers(live, "base", reference) == answers(live, "step", reference) == ["r3-mlp"]
    assert listed(live) == ("step", ["step"])
    assert live.client.get("/v1/models/base").json()["adapter"] == "step"
    body = {"prompt": [5, 6, 7], "max_tokens": 1}
    for asked in ({**body, "model": "base"}, body):
        assert live.post(**asked).headers["x-chorus-adapter"].startswith("step@1")
    assert answers(live, "first", reference) == ["r2-qv"]
    assert live.post("/v1/unload_lora_adapter", lora_name="step").status_code == 200
    assert answers(live, "base", reference) == [None]
    assert listed(live) == (None, [])
    assert "x-chorus-adapter" not in live.post(**body).headers


def test_a_new_version_takes_over_and_another_name_replaces_it(begin, reference):
    live = begin()
    live.post("/v1/adapters", name="step", path="r3-mlp", as_base=True)
    live.post("/v1/adapters", name="step", path="r8-attention")
    assert answers(live, "base", reference) == ["r8-attention"]
    live.post("/v1/adapters", name="other", path="r3-mlp", as_base=True)
    assert listed(live) == ("other", ["other"])
    assert answers(live, "base", reference) == ["r3-mlp"]
    live.post("/v1/adapters", name="step", path="r8-attention", as_base=False)
    assert listed(live) == ("other", ["other"]), "it was not this one"
    live.post("/v1/adapters", name="other", path="r3-mlp", as_base=False)
    assert answers(live, "base", reference) == [None]
    assert answers(live, "other", reference) == ["r3-mlp"]


def test_a_failed_load_changes_nothing(begin, reference):
    live = begin()
    assert load(live, "step", "nowhere", as_base=True).status_code == 404
    assert load(live, "step", "r3-mlp", as_base="so").status_code == 400
    assert load(live, "base", "r3-mlp", as_base=True).json()["error"]["message"].endswith("have it serve that one")
    assert listed(live) == (None, [])
    assert answers(live, "base", reference) == [None]


def test_removing_one_version_keeps_the_name(begin, reference):
    live = begin()
    live.post("/v1/adapters", name="step", path="r3-mlp", as_base=True, keep_versions=2)
    live.post("/v1/adapters", name="step", path="r8-attention", keep_versions=2)
    assert live.client.delete("/v1/adapters/step@2").status_code == 200
    assert answers(live, "base", reference) == ["r3-mlp"]
    assert live.client.delete("/v1/adapters/step").status_code == 200
    assert answers(live, "base", reference) == [None]


def test_rights_are_those_to_the_base(begin, reference, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-base-key-0001 base-only adapters=other-*\nsk-none-key-0002 no-base adapters=* base=no\n")
    live = begin(settings={"api_key_file": keys, "admin_key": ["sk-admin-key-0003"]})
    admin, base, no_base = (
        {"authorization": f"Bearer {key}"} for key in ("sk-admin-key-0003", "sk-base-key-0001", "sk-none-key-0002")
    )
    body = {"name": "step", "path": "r3-mlp", "as_base": True}
    assert live.client.post("/v1/adapters", json=body, headers=admin).status_code == 201
    assert answers(live, "base", reference, base) == ["r3-mlp"]
    asked = {"prompt": [5], "max_tokens": 1}
    for headers, model, status in ((base, "step", 404), (no_base, "base", 404), (no_base, "step", 200)):
        response = live.client.post("/v1/completions", json={**asked, "model": model}, headers=headers)
        assert response.status_code == status


def test_the_flag(begin, reference):
    live = begin(settings={"adapter_as_base": "first"})
    assert answers(live, "base", reference) == ["r2-qv"]
    assert listed(live) == ("first", ["first"])


def test_a_broken_adapter_is_an_error_and_never_the_base(begin, root):
    """It is told, as for a request that names it."""
    live = begin()
    live.post("/v1/adapters", name="step", path="r3-mlp", as_base=True)
    live.client.patch("/v1/adapters/step", json={"paused": True})
    assert live.post(model="base", prompt=[5], max_tokens=1).status_code == 503


def test_an_unknown_name_stops_the_start(make_engine, tokenizer, monkeypatch):
    def load(settings):
        worker = EngineWorker(lambda: make_engine(["first"]))
        worker.start()
        return worker, tokenizer

    monkeypatch.setattr(launch, "load", load)
    with pytest.raises(launch.LaunchError, match="--adapter-as-base nobody: no adapter has this name"):
        launch.build_app(Settings(adapter_as_base="nobody"))
    app = launch.build_app(Settings(adapter_as_base="first"))
    assert app.state.worker.adapters.as_base == "first"
    app.state.worker.stop()


@pytest.mark.parametrize("plan", [{"api_servers": 2}, {"registry": "/tmp/names.sqlite"}])
def test_several_api_servers_refuse_it(reference, plan):
    settings = Settings(model=reference.model, adapter_as_base="first")
    with pytest.raises(launch.LaunchError, match=r"--adapter-as-base: .* --api-servers 1"):
        up(ClusterPlan(replicas=1, **{"api_servers": 1, **plan}), settings, {})


def test_a_load_in_such_a_cluster_is_refused(begin, tmp_path, monkeypatch):
    live = begin()
    monkeypatch.setattr(live.app.state.worker, "shared", tmp_path)
    error = load(live, "step", "r3-mlp", as_base=True).json()["error"]
    assert (error["param"], error["code"]) == ("as_base", "unsupported_parameter")
    assert listed(live) == (None, [])
    assert load(live, "step", "r3-mlp").status_code == 200
