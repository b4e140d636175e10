"""Tokens of texts and texts of tokens, and the requests of gateways."""

import httpx
import pytest

BOS = 256
USER = [{"role": "user", "content": "hi"}]


def test_tokenize_a_text(shared, pretrained):
    body = shared.post("/tokenize", prompt="a€").json()
    assert body == {"count": 5, "max_model_len": 512, "tokens": [BOS, *"a€".encode()], "token_strs": None}
    body = shared.post("/tokenize", model="base", prompt="ab", add_special_tokens=False, return_token_strs=True).json()
    assert body["tokens"] == [97, 98] and body["token_strs"] == ["a", "b"]
    body = shared.post("/tokenize", prompt="a €", return_token_strs=True).json()
    assert body["token_strs"] == pretrained.convert_ids_to_tokens(body["tokens"])
    assert body["token_strs"][2] == "Ġ"


def test_tokenize_a_conversation(shared):
    body = shared.post("/tokenize", messages=USER).json()
    assert bytes(body["tokens"]) == b"user: hi\nassistant: "
    body = shared.post("/tokenize", messages=USER, add_generation_prompt=False).json()
    assert bytes(body["tokens"]) == b"user: hi\n"


@pytest.mark.parametrize("text", ["", "a", "a€😀 b"])
def test_there_and_back(shared, text):
    tokens = shared.post("/tokenize", prompt=text, add_special_tokens=False).json()["tokens"]
    assert shared.post("/detokenize", tokens=tokens).json() == {"prompt": text}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "a", "surprise": 1}, "surprise"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": USER, "surprise": 1}, "surprise"),
        ("/detokenize", {"tokens": [300]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
def test_wrong_input_is_named(shared, path, body, param):
    response = shared.post(path, **body)
    assert response.status_code == 400 and response.json()["error"]["param"] == param, response.text


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/tokenize", {"messages": USER}),
        ("/detokenize", {"tokens": [97]}),
        ("/v1/messages/count_tokens", {"messages": USER}),
        ("/v1/responses/input_tokens", {"input": "a"}),
    ],
)
def test_a_model_that_there_is_not_is_a_404(shared, path, body):
    for model, status in (("base", 200), ("alice", 200), ("base:alice", 200), ("none", 404), ("base:none", 404)):
        response = shared.post(path, model=model, **body)
        assert response.status_code == status, (model, response.text)
        if status == 404:
            assert "there is no model" in response.json()["error"]["message"]


def test_texts_beyond_any_context_are_refused_before_they_are_tokenized(shared):
    error = shared.post("/tokenize", prompt="x" * 100_000).json()["error"]
    assert error["code"] == "context_length_exceeded"


def test_ping_follows_health(start, fake_engine):
    live = start(fake_engine)
    assert live.client.get("/ping").status_code == live.client.post("/ping", json={}).status_code == 200
    live.worker.failure = "gone"
    assert live.client.get("/ping").status_code == 503


def test_load_counts_calls_in_progress(start, fake_engine):
    live = start(fake_engine)

    def load():
        return live.client.get("/load").json()["server_load"]

    assert load() == 0
    fake_engine.step_seconds = 0.01
    body = {"prompt": "x" * 200, "max_tokens": 200, "stream": True}
    with live.client.stream("POST", "/v1/completions", json=body) as response:
        chunks = response.iter_bytes()  # dropping it would close the connection
        assert next(chunks)
        assert httpx.get(live.url + "/load").json() == {"server_load": 1}
    live.wait_until(lambda: load() == 0)
    assert live.post(prompt="ok").status_code == 200 and live.post(prompt=[]).status_code == 400
    assert load() == 0


def test_what_a_tokenizer_writes_prompts_with_is_told_on_demand(shared, start, fake_engine, pretrained):
    assert shared.client.get("/tokenizer_info").status_code == 404
    told = start(fake_engine, settings={"enable_tokenizer_info_endpoint": True}).client.get("/tokenizer_info").json()
    assert told["chat_template"] == pretrained.chat_template and told["eos_token"] == "<eos>"
    assert told["tokenizer_class"] == type(pretrained).__name__ and told["unk_token"] is None
