"""Several adapters in one request, in our words, in llama.cpp's and in LoRAX's, over HTTP with a real engine."""

from __future__ import annotations

import shutil

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine

COUNT = 6
PAIR = "first*0.7+second*0.5"
TERMS = {"first": 0.7, "second": 0.5}


@pytest.fixture(scope="module")
def reference(subject):
    return subject("wide_heads")


@pytest.fixture
def begin(start, reference, tmp_path):
    root = tmp_path / "root"
    for name in ("r2-qv", "r3-mlp", "r8-attention"):
        shutil.copytree(reference.adapters[name], root / name)

    def begin(**options):
        settings = {"memory_bytes": 8 << 20, "threads": 1, "cpu_kernels": "torch"}
        engine = Engine.from_config(EngineConfig(model=reference.model, **settings))
        engine.store.register("first", root / "r2-qv")
        engine.store.register("second", root / "r8-attention")
        return start(engine, adapter_roots=(root,), **options)

    return begin


@pytest.fixture(scope="module")
def want(reference):
    """PEFT's tokens, by prompt."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(reference.model, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, reference.adapters["r2-qv"], "first").eval()
    model.load_adapter(reference.adapters["r8-attention"], "second")
    names, weights = list(TERMS), list(TERMS.values())
    model.add_weighted_adapter(names, weights, "pair", combination_type="cat")
    model.add_weighted_adapter(["first"], [0.7], "scaled", combination_type="cat")

    def greedy(name, prompt):
        model.set_adapter(name)
        tokens = torch.tensor([prompt])
        with torch.inference_mode():
            for _ in range(COUNT):
                tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
        return tokens[0, len(prompt) :].tolist()

    return greedy


PROMPT = [5, 9, 13, 21, 8, 30, 17]
BODY = {"prompt": PROMPT, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


def tokens_of(response):
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["token_ids"]


WAYS = {
    "model": {"model": PAIR},
    "the other order": {"model": "second * 0.5 + first*.7"},
    "after the base": {"model": f"base:{PAIR}"},
    "lora_path": {"lora_path": PAIR},
    "adapters": {"adapters": [{"name": name, "scale": scale} for name, scale in TERMS.items()]},
    "beside the base": {"model": "base", "adapters": [{"name": name, "scale": scale} for name, scale in TERMS.items()]},
    "llama.cpp": {"lora": [{"id": name, "scale": scale} for name, scale in TERMS.items()]},
    "LoRAX": {"merged_adapters": {"ids": list(TERMS), "weights": list(TERMS.values()), "merge_strategy": "cat"}},
}


def test_all_ways_to_say_it(begin, want):
    live, expected = begin(), want("pair", PROMPT)
    assert expected not in (want("first", PROMPT), want("second", PROMPT))
    for way, fields in WAYS.items():
        response = live.post(**{**BODY, **fields})
        assert tokens_of(response) == expected, way
        assert response.headers["x-chorus-adapter"].startswith("first@1, second@1")
    assert live.post(**{**BODY, "model": PAIR}).json()["model"] == PAIR
    listed = live.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in listed] == ["base", "first", "second"], "they are no models of their own"


def test_scales_of_one_and_none(begin, want):
    live = begin()
    base = tokens_of(live.post(**BODY))
    assert tokens_of(live.post(**BODY, model="first*0.7")) == want("scaled", PROMPT)
    assert tokens_of(live.post(**BODY, adapters=[{"name": "first"}])) == want("first", PROMPT)
    assert tokens_of(live.post(**BODY, lora=[{"id": "first", "scale": 1}, {"id": "second", "scale": 0}])) == want(
        "first", PROMPT
    )
    for nothing in ([{"id": "first", "scale": 0}], []):
        assert tokens_of(live.post(**BODY, lora=nothing)) == base
    assert tokens_of(live.post(**BODY, merged_adapters={})) == base


def test_chat_and_loraxs_own_route(begin, want, reference):
    live = begin()
    messages = [{"role": "user", "content": "hi"}]
    options = {"max_tokens": 4, "temperature": 0, "return_token_ids": True}
    by_model, by_field = (
        live.client.post("/v1/chat/completions", json={**options, "messages": messages, **fields}).json()
        for fields in (WAYS["model"], WAYS["adapters"])
    )
    assert by_model["choices"] == by_field["choices"]
    body = {"inputs": "hi", "parameters": {"max_new_tokens": 3, **WAYS["LoRAX"]}}
    assert live.client.post("/generate", json=body).status_code == 200
    assert live.client.post("/tokenize", json={"prompt": "hi", "model": PAIR}).status_code == 200


REFUSED = {
    "LoRAX's linear": ({"merged_adapters": {"ids": ["first"], "merge_strategy": "linear"}}, "merged_adapters", "cat"),
    "LoRAX's default": ({"merged_adapters": {"ids": ["first"]}}, "merged_adapters", "linear"),
    "LoRAX's ties": ({"merged_adapters": {"ids": ["first"], "merge_strategy": "ties"}}, "merged_adapters", "'ties'"),
    "weights": (
        {"merged_adapters": {"ids": ["first"], "weights": [1, 2], "merge_strategy": "cat"}},
        "merged_adapters",
        "2 weights for 1",
    ),
    "an unknown number of llama.cpp": ({"lora": [{"id": 2, "scale": 1}]}, "lora", "GET /lora-adapters"),
    "such a number with the scale 0": ({"lora": [{"id": 2, "scale": 0}]}, "lora", "the id 2"),
    "a number and a name": ({"lora": [{"id": 0, "scale": 1}], "lora_path": "first"}, "lora", "give one of them"),
    "a truth": ({"lora": [{"id": True, "scale": 1}]}, "lora", "id"),
    "an unknown field": (
        {"adapters": [{"name": "first", "weight": 1}]},
        "adapters[0].weight",
        "no field adapters[0].weight",
    ),
    "no number": ({"adapters": [{"name": "first", "scale": "1"}]}, "adapters[0].scale", "number"),
    "a huge scale": ({"adapters": [{"name": "first", "scale": 1e9}]}, "adapters", "-10000 to 10000"),
    "a huge scale in the name": ({"model": "first*1e9"}, "model", "-10000 to 10000"),
    "two fields": ({**WAYS["adapters"], **WAYS["llama.cpp"]}, "lora", "give one of them"),
    "two names": ({"lora_path": "first", **WAYS["adapters"]}, "adapters", "give one of them"),
    "another model": ({"model": "first", **WAYS["adapters"]}, "model", "two adapters"),
    "too many": ({"adapters": [{"name": f"a{i}"} for i in range(17)]}, "adapters", "at most 16"),
}


def test_refusals(begin):
    live = begin()
    for case, (fields, param, words) in REFUSED.items():
        response = live.post(**{**BODY, **fields})
        assert response.status_code == 400, (case, response.text)
        error = response.json()["error"]
        assert words in error["message"], (case, error)
        assert "lora_path" not in error["message"] or "lora_path" in fields, (case, "a field that was not sent")
        assert error["param"].split(".")[0].split("[")[0] == param.split(".")[0].split("[")[0], (case, error)


def test_numbers_of_llama_cpp(begin, want, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-first-key-0001 one adapters=first base=no\n")
    live = begin(settings={"api_key_file": keys, "admin_key": ["sk-admin-key-0004"]})
    admin, first = ({"authorization": f"Bearer {key}"} for key in ("sk-admin-key-0004", "sk-first-key-0001"))

    def listed(headers):
        found = live.client.get("/lora-adapters", headers=headers).json()
        assert all(set(one) == {"id", "name", "path", "scale"} for one in found)
        return {one["id"]: one["name"] for one in found}

    def ask(*scales, status=200, headers=admin, begins=0):
        lora = [{"id": begins + number, "scale": scale} for number, scale in enumerate(scales)]
        response = live.client.post("/v1/completions", json={**BODY, "lora": lora}, headers=headers)
        assert response.status_code == status, response.text
        return tokens_of(response) if status == 200 else response.json()["error"]

    assert listed(admin) == {0: "first", 1: "second"}
    ((own, name),) = listed(first).items()
    assert name == "first" and own > 1, "not one that tells how many adapters there are"
    assert ask(0.7, 0.5) == want("pair", PROMPT)
    assert ask(0.7, 0) == ask(0.7, headers=first, begins=own) == want("scaled", PROMPT)
    assert ask(0, 0) not in (want("first", PROMPT), want("second", PROMPT))
    assert ask(0.7, 0.5, status=400, headers=first)["param"] == "lora"
    body = {"lora_name": "first", "lora_path": "r3-mlp", "load_inplace": True}
    assert live.client.post("/v1/load_lora_adapter", json=body, headers=admin).status_code == 200
    again = listed(admin)
    assert again.pop(1) == "second"
    ((number, name),) = again.items()
    assert number > 1 and name == "first", "a number never means another adapter"
    assert "no adapter has the id 0" in ask(0.7, 0.5, status=400)["message"]
    live.client.post("/v1/chat/completions", json={"messages": [], "lora": [{"id": 1, "scale": 1}]}, headers=admin)
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "lora": [{"id": 1, "scale": 1}]}
    assert live.client.post("/v1/chat/completions", json=chat, headers=admin).json()["model"] == "second"
    assert live.client.post("/lora-adapters", json=[], headers=admin).status_code == 501


def test_numbers_need_one_api_server(begin, tmp_path, monkeypatch):
    live = begin()
    monkeypatch.setattr(live.app.state.worker, "shared", tmp_path)
    for response in (live.client.get("/lora-adapters"), live.post(**BODY, lora=[{"id": 0, "scale": 1}])):
        assert response.status_code == 400 and "one API server" in response.text
    assert live.post(**BODY, lora=[{"id": "first", "scale": 1}]).status_code == 200


def test_an_unknown_part_is_named(begin):
    live = begin()
    response = live.post(**BODY, model="first*0.7+secomd*0.5")
    assert response.status_code == 404
    assert "secomd" in response.text and "did you mean" in response.text.lower()
    live.post("/v1/unload_lora_adapter", lora_name="second")
    assert live.post(**BODY, model=PAIR).status_code == 404
    assert live.client.post("/tokenize", json={"prompt": "hi", "model": PAIR}).status_code == 404


def test_rights_to_all_are_needed(begin, want, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(
        "sk-first-key-0001 one adapters=first*\nsk-both-key-0002 two adapters=first,second base=no\n"
        "sk-globs-key-0003 three adapters=first*0.7+second*0.5\n"
    )
    live = begin(settings={"api_key_file": keys, "admin_key": ["sk-admin-key-0004"]})
    statuses = {}
    for key in ("sk-first-key-0001", "sk-both-key-0002", "sk-globs-key-0003"):
        response = live.client.post(
            "/v1/completions", json={**BODY, "model": PAIR}, headers={"authorization": f"Bearer {key}"}
        )
        statuses[key] = response.status_code
    assert statuses == {"sk-first-key-0001": 404, "sk-both-key-0002": 200, "sk-globs-key-0003": 404}
    both = {"authorization": "Bearer sk-both-key-0002"}
    nothing = {**BODY, "lora": [{"id": "first", "scale": 0}]}
    assert live.client.post("/v1/completions", json=nothing, headers=both).status_code == 404, "that is the base model"


def test_drain_counts_them_and_files_stay(begin):
    live = begin()
    tokens_of(live.post(**BODY, model=PAIR))
    paths = live.worker.adapters.paths_in_use().result()
    assert {path.name for path in paths} == {"r2-qv", "r8-attention"}
    assert live.worker.adapters.num_requests("first").result() == 0
    assert live.client.post("/v1/adapters/first/drain", json={"seconds": 1}).status_code == 200


def test_their_counts_are_not_a_series_each(begin):
    live = begin()
    for scale in (0.1, 0.2, 0.3):
        tokens_of(live.post(**BODY, model=f"first*{scale}+second*1"))
    text = live.client.get("/metrics").text
    assert "first*" not in text and "(others)" in text


def test_such_a_name_cannot_be_loaded(begin):
    response = begin().post("/v1/load_lora_adapter", lora_name=PAIR, lora_path="r2-qv")
    assert response.status_code == 400 and "reads as adapters with scales" in response.text
