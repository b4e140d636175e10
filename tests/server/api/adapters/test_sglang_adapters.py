"""SGLang's routes for adapters, and names with versions beside each other, with a real engine of a tiny model."""

from __future__ import annotations

import shutil
from functools import partial

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def live(start, reference, tmp_path):
    for name in ("r2-qv", "r8-attention"):
        shutil.copytree(reference.adapters[name], tmp_path / name)
    config = EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    return start(Engine.from_config(config), adapter_roots=(tmp_path,))


def tokens(live, model):
    body = {"model": model, "prompt": [5, 6, 7, 8], "max_tokens": 6, "temperature": 0, "return_token_ids": True}
    answer = live.client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


def test_load_and_unload(live, tmp_path):
    body = live.post("/load_lora_adapter", lora_name="a", lora_path="r8-attention", pinned=True).json()
    assert body == {"success": True, "error_message": "", "loaded_adapters": {"a": str(tmp_path / "r8-attention")}}
    assert live.client.get("/v1/adapters/a").json()["pinned"]
    again = live.post("/load_lora_adapter", lora_name="a", lora_path="r8-attention")
    assert again.status_code == 400 and not again.json()["success"]
    assert "already been loaded" in again.json()["error_message"] and list(again.json()["loaded_adapters"]) == ["a"]
    assert live.post("/unload_lora_adapter", lora_name="a").json() == {
        "success": True,
        "error_message": "",
        "loaded_adapters": {},
    }
    assert live.post("/unload_lora_adapter", lora_name="a").status_code == 404


def test_a_name_gets_the_files_at_another_path_as_prime_rl_s_client_sends_each_step(live):
    for name, path in (("one", "r2-qv"), ("two", "r8-attention")):
        assert live.post("/load_lora_adapter", lora_name=name, lora_path=path).status_code == 200
        assert live.post("/load_lora_adapter", lora_name="policy", lora_path=path).json()["success"]
        assert tokens(live, "policy") == tokens(live, name)
    outside = live.post("/load_lora_adapter", lora_name="policy", lora_path="/elsewhere")
    assert outside.status_code == 403 and not outside.json()["success"]
    assert tokens(live, "policy") == tokens(live, "two")


def test_a_wrong_field_is_told(live):
    answer = live.post("/load_lora_adapter", lora_name="a", path="r2-qv")
    assert answer.status_code == 400 and "did you mean lora_path?" in answer.json()["error_message"]


@pytest.mark.parametrize("route", ["/load_lora_adapter", "/unload_lora_adapter"])
def test_a_number_of_an_adapter_is_refused_and_none_is_taken(live, route):
    live.post("/load_lora_adapter", lora_name="a", lora_path="r2-qv")
    body = {"lora_name": "a"} | ({} if "unload" in route else {"lora_path": "r8-attention"})
    refused = live.post(route, **body, lora_id="7")
    assert refused.status_code == 400 and "there is no field 'lora_id'" in refused.json()["error_message"]
    assert tokens(live, "a")
    assert live.post(route, **body, lora_id=None).json()["success"]


def test_a_load_that_is_not_pinned_unpins(live):
    """Where a load says nothing, the name stays as it is."""

    def pinned_after(**more):
        assert live.post("/load_lora_adapter", lora_name="a", **more).json()["success"]
        return live.client.get("/v1/adapters/a").json()["pinned"]

    assert pinned_after(lora_path="r2-qv", pinned=True)
    assert pinned_after(lora_path="r8-attention")
    assert not pinned_after(lora_path="r2-qv", pinned=False)


def test_advice_is_of_fields_that_the_route_has(live):
    load = partial(live.post, "/load_lora_adapter", lora_name="a")
    assert load(lora_path="r2-qv").status_code == 200
    again = load(lora_path="r2-qv").json()["error_message"]
    assert "load_inplace" not in again and "already been loaded" in again and "POST /unload_lora_adapter" in again
    for route in ("/load_lora_adapter", "/skyrl/v1/load_lora_adapter"):
        missing = live.post(route, lora_name="b")
        assert missing.status_code == 400 and "give lora_path, the adapter's directory" in missing.text, missing.text
        assert "adapter_config" not in missing.text
    assert "adapter_config" in live.post("/v1/load_lora_adapter", lora_name="b").text
    of_vllm = live.post("/v1/load_lora_adapter", lora_name="a", lora_path="r2-qv").json()["error"]["message"]
    assert of_vllm == "The lora adapter 'a' has already been loaded. To replace it, set 'load_inplace' to true."


def pin_until_full(live):
    """Pin adapters until the next one finds no room; its name, and the answer."""
    for number in range(200):
        name = f"pinned-{number}"
        answer = live.post("/load_lora_adapter", lora_name=name, lora_path="r8-attention", pinned=True)
        if answer.status_code != 200:
            return name, answer
    raise AssertionError("there was always room")


def test_a_new_adapter_that_can_not_be_pinned_is_not_loaded(live):
    name, refused = pin_until_full(live)
    body = refused.json()
    assert refused.status_code == 400 and not body["success"] and "pinned adapters would take" in body["error_message"]
    assert name not in body["loaded_adapters"] and live.client.get(f"/v1/adapters/{name}").status_code == 404
    again = live.post("/load_lora_adapter", lora_name=name, lora_path="r8-attention")
    assert again.status_code == 200 and name in again.json()["loaded_adapters"], "a retry without the pin"


@pytest.mark.parametrize("has_plain", [True, False])
def test_a_label_that_can_not_be_pinned_takes_no_other_version_away(live, has_plain):
    if has_plain:
        live.post("/load_lora_adapter", lora_name="policy", lora_path="r2-qv")
    live.post("/load_lora_adapter", lora_name="policy@v1", lora_path="r2-qv")
    before = tokens(live, "policy@v1")
    pin_until_full(live)
    refused = live.post("/load_lora_adapter", lora_name="policy@v2", lora_path="r8-attention", pinned=True)
    assert refused.status_code == 400 and not refused.json()["success"], refused.text
    loaded = refused.json()["loaded_adapters"]
    assert ("policy" in loaded) == has_plain and "policy@v1" in loaded and "policy@v2" not in loaded
    assert tokens(live, "policy") == tokens(live, "policy@v1") == before
    gone = live.post("/unload_lora_adapter", lora_name="policy@v1@v1")
    assert not gone.json()["success"] and tokens(live, "policy@v1") == before


def test_a_replaced_adapter_that_can_not_be_pinned_serves_and_says_so(live):
    live.post("/load_lora_adapter", lora_name="policy", lora_path="r2-qv")
    pin_until_full(live)
    answer = live.post("/load_lora_adapter", lora_name="policy", lora_path="r8-attention", pinned=True)
    body = answer.json()
    assert answer.status_code == 200 and body["success"] and body["loaded_adapters"]["policy"].endswith("r8-attention")
    assert "'policy' is loaded, but not pinned: pinned adapters would take" in body["error_message"]
    assert tokens(live, "policy") == tokens(live, "pinned-0")
    assert not live.client.get("/v1/adapters/policy").json()["pinned"]


def test_a_load_in_skyrl_s_form_checks_its_fields(live):
    def load(path, **more):
        return live.post("/skyrl/v1/load_lora_adapter", lora_name="policy", lora_path=path, **more)

    assert load("r2-qv", load_inplace=False).status_code == 200
    again = load("r8-attention", load_inplace=False)
    assert again.status_code == 400 and again.json()["error"]["code"] == "adapter_already_loaded"
    wrong = load("r8-attention", base_model_name="another")
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "base_model_name"
    before = tokens(live, "policy")
    assert load("r8-attention", base_model_name="base").status_code == 200
    assert tokens(live, "policy") != before
    assert load("r2-qv", load_inplace=True).status_code == 200 and tokens(live, "policy") == before


@pytest.mark.parametrize("route", ["/v1/load_lora_adapter", "/load_lora_adapter"])
def test_labels_of_a_name_are_adapters_beside_each_other(live, route):
    for label, path in (("v1", "r2-qv"), ("v2", "r8-attention")):
        assert live.post(route, lora_name=f"org/name@{label}", lora_path=path).status_code == 200
    for name, path in (("one", "r2-qv"), ("two", "r8-attention")):
        assert live.post(route, lora_name=name, lora_path=path).status_code == 200
    assert tokens(live, "org/name@v1") == tokens(live, "one") != tokens(live, "two") == tokens(live, "org/name@v2")
    assert tokens(live, "org/name") == tokens(live, "two"), "the plain name is the newest"
    unload = route.replace("load_", "unload_")
    assert live.post(unload, lora_name="org/name@v1").status_code == 200
    assert tokens(live, "org/name@v2") == tokens(live, "two")


ROUTES = ["/v1/load_lora_adapter", "/load_lora_adapter", "/skyrl/v1/load_lora_adapter"]


def served(live):
    return [one["id"] for one in live.client.get("/v1/models").json()["data"]][1:]


def load(live, route, name, path, **fields):
    answer = live.post(route, lora_name=name, lora_path=path, **fields)
    assert answer.status_code == 200, answer.text
    return answer


@pytest.mark.parametrize("route", ROUTES)
def test_a_plain_name_is_beside_its_labels_and_replaces_only_itself(live, route):
    load(live, route, "one", "r2-qv")
    load(live, route, "two", "r8-attention")
    load(live, route, "m@v1", "r2-qv")
    load(live, route, "m@v2", "r8-attention")
    assert served(live) == ["m@v1", "m@v2", "one", "two"]
    load(live, route, "m", "r2-qv")
    assert served(live) == ["m", "m@v1", "m@v2", "one", "two"]
    again = {"load_inplace": True} if route == ROUTES[0] else {}
    load(live, route, "m", "r8-attention", **again)
    load(live, route, "m@v3", "r2-qv")
    assert served(live) == ["m", "m@v1", "m@v2", "m@v3", "one", "two"]
    wanted = {"m": "two", "m@v1": "one", "m@v2": "two", "m@v3": "one"}
    assert {name: tokens(live, name) for name in wanted} == {a: tokens(live, b) for a, b in wanted.items()}
    unload = "/unload_lora_adapter" if route == ROUTES[1] else "/v1/unload_lora_adapter"
    assert live.post(unload, lora_name="m@v3").status_code == 200
    assert served(live) == ["m", "m@v1", "m@v2", "one", "two"]


@pytest.mark.parametrize("route", ROUTES)
def test_a_name_with_labels_alone_means_the_latest_and_is_not_loaded(live, route):
    load(live, route, "m@v1", "r2-qv")
    load(live, route, "m@v2", "r8-attention")
    assert live.client.delete("/v1/adapters/m").status_code == 404
    paused = live.client.patch("/v1/adapters/m", json={"paused": True})
    assert paused.status_code == 200 and paused.json()["paused"], paused.text
    load(live, route, "m@v3", "r2-qv")
    for name in ("m", "m@v1", "m@v3"):
        answer = live.post(model=name, prompt=[5])
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "adapter_paused"
    assert live.client.delete("/v1/adapters/m@v3").status_code == 200
    assert live.post(model="m", prompt=[5]).status_code == 503, "the others are paused still"
    assert not live.client.patch("/v1/adapters/m", json={"paused": False}).json()["paused"]
    assert tokens(live, "m") == tokens(live, "m@v2") != tokens(live, "m@v1")


@pytest.mark.parametrize("route", ROUTES)
def test_numbers_of_checkpoints_may_come_in_any_order(live, route):
    for number, path in ((5, "r2-qv"), (3, "r8-attention")):
        load(live, route, f"z@{number}", path)
    assert served(live) == ["z@3", "z@5"]
    taken = live.post(route, lora_name="z@3", lora_path="r2-qv")
    assert taken.status_code == 400, "a label means one content"
    load(live, route, "z", "r2-qv")
    assert live.client.get("/v1/adapters/z").json()["version"] == 6


def test_a_pin_is_a_label_s_and_the_list_has_all_labels(live):
    load(live, ROUTES[1], "m@v1", "r2-qv", pinned=True)
    listed = load(live, ROUTES[1], "m@v2", "r8-attention").json()["loaded_adapters"]
    assert list(listed) == ["m@v1", "m@v2"]
    load(live, ROUTES[1], "m", "r8-attention")
    pins = {name: live.client.get(f"/v1/adapters/{name}").json()["pinned"] for name in ("m", "m@v1", "m@v2")}
    assert pins == {"m": False, "m@v1": True, "m@v2": False}


def test_a_label_of_another_server_may_serve_as_the_base(live):
    load(live, ROUTES[0], "one", "r2-qv")
    load(live, ROUTES[0], "m", "r8-attention")
    load(live, ROUTES[0], "m@v1", "r2-qv", as_base=True)
    assert tokens(live, "base") == tokens(live, "one") != tokens(live, "m")


def test_the_versions_that_a_load_or_the_server_wants_kept_are_kept(start, reference, tmp_path, live):
    for label, path in (("v1", "r2-qv"), ("v2", "r8-attention")):
        body = {"lora_name": f"a@{label}", "lora_path": path, "keep_versions": 1}
        assert live.client.post("/v1/load_lora_adapter", json=body).status_code == 200
        assert live.post("/v1/adapters", name=f"b@{label}", path=path).status_code in (200, 201)
    names = [one["id"] for one in live.client.get("/v1/models").json()["data"]]
    assert names[1:] == ["a", "b"], "one of each"
    config = EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    told = start(Engine.from_config(config), adapter_roots=(tmp_path,), settings={"keep_versions": 1})
    for label, path in (("v1", "r2-qv"), ("v2", "r8-attention")):
        told.post("/v1/load_lora_adapter", lora_name=f"a@{label}", lora_path=path)
    assert [one["id"] for one in told.client.get("/v1/models").json()["data"]][1:] == ["a"]


def test_requests_for_the_base_after_a_load_are_a_sign(live):
    tokens(live, "base")
    live.post("/load_lora_adapter", lora_name="policy", lora_path="r2-qv")
    tokens(live, "policy")
    tokens(live, "base")
    assert "chorus_base_requests_after_load_total 1.0" in live.client.get("/metrics").text
    live.post("/unload_lora_adapter", lora_name="policy")
    tokens(live, "base")
    assert "chorus_base_requests_after_load_total 1.0" in live.client.get("/metrics").text


def test_a_rollout_s_key_of_another_tenant_is_a_sign_too(start, reference, tmp_path, live):
    keys = tmp_path / "keys"
    keys.write_text(
        "sk-trainer-key ops admin=yes\nsk-rollout-key rollouts adapters=policy\nsk-other-key other adapters=x\n"
    )
    config = EngineConfig(model=reference.model, memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    live = start(Engine.from_config(config), adapter_roots=(tmp_path,), settings={"api_key_file": keys})

    def told(key):
        return {"authorization": f"Bearer sk-{key}-key"}

    body = {"lora_name": "policy", "lora_path": "r2-qv"}
    assert live.client.post("/v1/load_lora_adapter", json=body, headers=told("trainer")).status_code == 200
    for key in ("rollout", "other", "rollout"):
        asked = {"model": "base", "prompt": [5], "max_tokens": 1}
        assert live.client.post("/v1/completions", json=asked, headers=told(key)).status_code == 200
    metrics = live.client.get("/metrics", headers=told("trainer")).text
    assert "chorus_base_requests_after_load_total 2.0" in metrics
