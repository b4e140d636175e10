"""Requests of `vllm bench serve`, `genai-perf`, `aiperf` and Open WebUI are taken as they are, and answered as they
read it.

The bodies are theirs, field for field.
"""

import json

import pytest

USAGE = {"stream": True, "stream_options": {"include_usage": True}}

VLLM_COMPLETION = {"prompt": "abcdef", "repetition_penalty": 1.0, "max_tokens": 4, "logprobs": None, **USAGE}
VLLM_CHAT = {
    "messages": [{"role": "user", "content": [{"type": "text", "text": "abcdef"}]}],
    "max_completion_tokens": 4,
    **USAGE,
}
GENAI_COMPLETION = {"prompt": ["abcdef"], "stream": True, "max_tokens": 4, "min_tokens": 4}
GENAI_CHAT = {"messages": [{"role": "user", "content": "abcdef"}], "stream": True, "max_tokens": 4, "min_tokens": 4}
AIPERF_CHAT = {
    "messages": [{"role": "user", "name": "x", "content": "abcdef"}],
    "max_completion_tokens": 4,
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}
SAMPLING = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "frequency_penalty": 0, "presence_penalty": 0}


def ask(shared, body, **more):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return shared.post(path, model="alice", ignore_eos=True, **body, **more)


@pytest.mark.parametrize("body", [VLLM_COMPLETION, VLLM_CHAT, GENAI_COMPLETION, GENAI_CHAT, AIPERF_CHAT])
@pytest.mark.parametrize("more", [{}, SAMPLING, {"logprobs": 1}])
def test_their_bodies_are_taken(shared, read_events, body, more):
    if "messages" in body and "logprobs" in more:
        more = {"logprobs": True, "top_logprobs": 1}
    chunks = read_events(ask(shared, {**body, **more}))
    contents = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert contents[-1]["finish_reason"] == "length"
    assert {chunk["object"] for chunk in chunks} == {
        "chat.completion.chunk" if "messages" in body else "text_completion"
    }


@pytest.mark.parametrize("body", [VLLM_COMPLETION, VLLM_CHAT])
def test_vllm_finds_a_chunk_per_token_and_the_counts_at_the_end(shared, read_events, body):
    *chunks, last = read_events(ask(shared, body))
    assert not last["choices"]
    assert last["usage"]["completion_tokens"] == 4
    tokens = [chunk for chunk in chunks if "messages" not in body or chunk["choices"][0]["delta"].get("content")]
    assert len(tokens) == 4
    assert all(chunk["usage"] is None for chunk in chunks)


def test_every_chunk_counts_when_asked_to(shared, read_events):
    *chunks, last = read_events(ask(shared, AIPERF_CHAT))
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] == 0, "the opening of a message has no token yet"
    assert set(counts) == {0, 1, 2, 3, 4}
    assert all(chunk["usage"]["prompt_tokens"] == last["usage"]["prompt_tokens"] for chunk in chunks)
    assert last["usage"]["completion_tokens"] == 4


def test_tokens_whose_text_is_held_back_are_counted_as_they_come(shared, read_events):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"model": "base", "prompt": "é", "max_tokens": 2, "stream": True}
    *chunks, _ = read_events(shared.post(**body, stream_options=options))
    assert [(chunk["choices"][0]["text"], chunk["usage"]["completion_tokens"]) for chunk in chunks] == [
        ("", 1),
        ("é", 2),
    ]
    *chunks, _ = read_events(shared.post(**body, stream_options={"include_usage": True}))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["é"]


def test_running_counts_need_the_final_one(shared, read_events):
    body = {"model": "base", "prompt": "ab", "max_tokens": 2, "stream": True}
    chunks = read_events(shared.post(**body, stream_options={"continuous_usage_stats": True}))
    assert all("usage" not in chunk for chunk in chunks)


def test_models_and_metrics_are_where_they_look(shared):
    first = shared.client.get("/v1/models").json()["data"][0]
    assert (first["id"], first["root"]) == ("base", "base")
    assert "vllm:spec_decode" not in shared.client.get("/metrics").text
    assert json.loads(shared.client.get("/health").text)["status"] == "ok"


def test_open_webui_lists_models_chats_and_asks_for_a_title(start, make_engine, read_events):
    shared = start(make_engine(["alice"], max_model_len=4096))
    models = shared.client.get("/v1/models", headers={"authorization": "Bearer x"}).json()
    assert models["object"] == "list" and {"id", "object", "created", "owned_by"} <= models["data"][0].keys()
    messages = [{"role": "user", "content": "abc"}]
    body = {"model": "alice", "messages": messages, **USAGE}
    *chunks, last = read_events(shared.post("/v1/chat/completions", **body, user="1", metadata={"chat_id": "1"}))
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) and last["usage"]
    title = {"model": "alice", "messages": messages, "stream": False, "max_completion_tokens": 1000}
    for limit in (title, {**title, "max_tokens": 50, "max_completion_tokens": None}):
        assert shared.post("/v1/chat/completions", **limit).json()["choices"][0]["message"]["content"]
    assert shared.client.get("/api/tags").status_code == 404, "Ollama's, which it asks where that is set up"
