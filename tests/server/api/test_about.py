"""Models, health, version and the OpenAI client, over a fake engine."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from chorus.core.executors.base import EngineLimits


def test_models(shared):
    cards = shared.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["base", "alice", "bob"]
    assert [card["parent"] for card in cards] == [None, "base", "base"]
    assert [card["root"] for card in cards] == ["base", "alice", "bob"], "names, no paths of this machine"
    assert shared.client.get("/v1/models/bob").json()["id"] == "bob"
    assert shared.client.get("/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_health_and_version(shared):
    body = shared.client.get("/health").json()
    assert body["status"] == "ok" and body["stats"]["num_pages"] == 100
    assert shared.client.get("/version").json()["version"]


def test_what_routers_ask(shared):
    info = shared.client.get("/server_info").json()
    assert (info["served_model_name"], info["model_path"], info["max_model_len"]) == ("base", "base", 512)
    assert info["version"] and info["vocab_size"] == 300 and info["max_num_seqs"] > 0
    info = shared.client.get("/model_info").json()
    assert (info["served_model_name"], info["model_path"], info["is_generation"]) == ("base", "base", True)
    assert shared.client.get("/get_model_info").json() == info
    assert shared.client.get("/get_server_info").json() == shared.client.get("/server_info").json()
    assert shared.client.get("/health_generate").json()["status"] == "ok"


@pytest.mark.parametrize("rank", [4096, 64])
def test_limits_are_those_that_hold(start_one, make_engine, rank):
    """Those of the engine, which the device may set: a CPU serves adapters of larger ranks."""
    engine = make_engine([])
    engine.model.limits = EngineLimits(max_num_seqs=256, max_num_batched_tokens=8192, max_lora_rank=rank)
    live = start_one(engine, settings={"tensor_parallel_size": 2})
    info = live.client.get("/server_info").json()
    assert (info["max_num_seqs"], info["max_num_batched_tokens"], info["max_lora_rank"]) == (256, 8192, rank)
    assert info["vllm_config"]["lora_config"] == {"max_lora_rank": rank, "max_loras": 256}
    assert info["tp_size"] == 2


@pytest.mark.parametrize("stream", [False, True])
def test_balancers_may_ask_for_the_load_with_an_answer(shared, stream):
    """ORCA's header, in both of its forms, under the names that vLLM gives."""

    def told(form, path="/v1/completions", body=None):
        body = {"prompt": "a", "stream": stream} if body is None else body
        answer = shared.client.post(path, json=body, headers={"endpoint-load-metrics-format": form})
        assert answer.status_code == 200
        return answer.headers.get("endpoint-load-metrics")

    kind, _, text = told("JSON").partition(" ")
    load = json.loads(text)["named_metrics"]
    assert kind == "JSON" and set(load) == {"kv_cache_usage_perc", "num_requests_waiting", "num_requests_running"}
    assert 0 <= load["kv_cache_usage_perc"] <= 1 and all(isinstance(value, float) for value in load.values())
    message = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stream": stream}
    kind, _, text = told("text", "/v1/messages", message).partition(" ")
    assert kind == "TEXT" and text.startswith("named_metrics.kv_cache_usage_perc=") and text.count(", ") == 2
    assert told("BIN") is None and told("") is None


def test_the_openai_client(shared):
    client = openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["base", "alice", "bob"]
    for model, text in (("base", "hello"), ("alice", "olleh")):
        completion = client.completions.create(model=model, prompt="hello")
        assert completion.choices[0].text == text
        stream = client.completions.create(model=model, prompt="hello", stream=True)
        assert "".join(chunk.choices[0].text for chunk in stream) == text
    expected = "user: hi\nassistant: "
    messages = [{"role": "user", "content": "hi"}]
    for model, text in (("base", expected), ("bob", expected[::-1])):
        answer = client.chat.completions.create(model=model, messages=messages)
        assert answer.choices[0].message.content == text
        with client.chat.completions.stream(
            model=model, messages=messages, stream_options={"include_usage": True}
        ) as stream:
            final = stream.get_final_completion()
        assert final.choices[0].message.content == text and final.usage.completion_tokens == len(text) + 1
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="nobody", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="base", prompt="x", suffix="y")
    assert caught.value.param == "suffix"
    with pytest.raises(openai.APIError):
        list(client.completions.create(model="base", prompt=[97, 0], stream=True))


def test_an_engine_is_paused_and_goes_on(start, fake_engine):
    live = start(fake_engine)
    assert live.client.post("/pause", params={"mode": "abort"}).status_code == 400
    assert live.client.post("/pause", params={"mode": "keep"}).json() == {"status": "paused"}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(live.post, prompt="abc")
        live.wait_until(lambda: fake_engine.running)
        steps = fake_engine.steps
        assert live.client.get("/health").status_code == 200 and not answer.done()
        assert fake_engine.steps == steps == 0
        assert live.client.post("/resume").json() == {"status": "resumed"}
        assert answer.result().json()["choices"][0]["text"] == "abc"


def test_models_of_the_hub_are_told_by_their_names(start, fake_engine):
    hub = Path("/cache/hub/models--org--small/snapshots") / ("a" * 40)
    live = start(fake_engine, settings={"model": hub})
    assert live.client.get("/v1/models").json()["data"][0]["root"] == "org/small"
    for path in ("/model_info", "/server_info"):
        assert live.client.get(path).json()["model_path"] == "org/small"


def test_paths_below_a_proxys_prefix_are_the_servers_own(start, fake_engine, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("key-of-a-client a tokens_per_minute=5\n")
    live = start(fake_engine, settings={"root_path": "/llm", "api_key_file": keys})
    authorized = {"authorization": "Bearer key-of-a-client"}
    for path in ("/v1/models", "/llm/v1/models"):
        assert live.client.get(path).status_code == 401
        assert live.client.get(path, headers=authorized).json()["data"][0]["id"] == "base"
    assert live.client.get("/llm/health").status_code == 200 and live.client.get("/llmm/health").status_code == 401
    refused = live.client.post("/llm/v1/messages", headers=authorized, json={"messages": []})
    assert refused.json()["type"] == "error", "Anthropic's shape, by the path without its prefix"
    asked = {"headers": authorized, "json": {"prompt": "abcdef", "max_tokens": 9}}
    assert live.client.post("/llm/v1/completions", **asked).status_code == 200
    assert live.client.post("/llm/v1/completions", **asked).status_code == 429, "the key's budget counts there, too"


def test_invocations_are_completions_and_chats(shared):
    body = shared.post("/invocations", prompt="abc").json()
    assert body["object"] == "text_completion" and body["choices"][0]["text"] == "abc"
    body = shared.post("/invocations", messages=[{"role": "user", "content": "hi"}]).json()
    assert body["object"] == "chat.completion" and body["choices"][0]["message"]["content"]
    assert shared.post("/invocations", surprise=1).json()["error"]["param"] == "surprise"
    error = shared.post("/invocations", messages="hi").json()["error"]
    assert error["param"] == "messages"
