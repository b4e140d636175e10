"""The OpenAI-compatible routes over a fake engine: answers, streams, counts and errors."""

import json

import openai
import pytest

BOS, EOS = 256, 257


def events(response) -> list[dict]:
    """The JSON events of a stream; checks the framing."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    frames = response.text.split("\n\n")
    assert frames.pop() == "" and frames.pop() == "data: [DONE]"
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


# --- completions ---


def test_completion_of_the_base_and_of_an_adapter(shared):
    body = shared.post(model="base", prompt="hello").json()
    assert body["object"] == "text_completion" and body["model"] == "base" and body["id"].startswith("cmpl-")
    assert body["choices"] == [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"] == {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12}
    assert shared.post(model="alice", prompt="hello").json()["choices"][0]["text"] == "olleh"


def test_max_tokens_defaults_to_16(shared):
    choice = shared.post(model="base", prompt="x" * 40).json()["choices"][0]
    assert choice["text"] == "x" * 16 and choice["finish_reason"] == "length"


def test_nulls_are_defaults_and_unknown_fields_are_ignored(shared):
    body = {"max_tokens": None, "stop": None, "logprobs": None, "n": 1, "user": "me", "frequency_penalty": 0.0}
    response = shared.post(model="base", prompt="hi", surprise={"a": 1}, tools=[], logit_bias={}, **body)
    assert response.json()["choices"][0]["text"] == "hi"


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("ab", ["ab"]),
        (["ab", "cd", "é"], ["ab", "cd", "é"]),
        ([97, 98], ["ab"]),
        ([[97, 98], [99]], ["ab", "c"]),
        (["ab", [99]], ["ab", "c"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_kind_of_prompt(shared, prompt, texts, stream):
    response = shared.post(model="base", prompt=prompt, stream=stream)
    if not stream:
        choices = response.json()["choices"]
        assert [choice["index"] for choice in choices] == list(range(len(texts)))
        assert [choice["text"] for choice in choices] == texts
        return
    got = [""] * len(texts)
    ends = []
    for event in events(response):
        (choice,) = event["choices"]
        got[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ends.append((choice["index"], choice["finish_reason"]))
    assert got == texts
    assert sorted(ends) == [(index, "stop") for index in range(len(texts))]


def test_streamed_completion_ends_with_usage_when_asked(shared):
    chunks = events(shared.post(model="base", prompt="abc", stream=True, stream_options={"include_usage": True}))
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"] == {"prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8}
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert "usage" not in events(shared.post(model="base", prompt="abc", stream=True))[-1]


def test_stop_strings_end_the_request(shared):
    body = shared.post(model="base", prompt="one, two, three", stop=["two", "zzz"]).json()
    assert body["choices"][0]["text"] == "one, " and body["choices"][0]["finish_reason"] == "stop"
    assert body["usage"]["completion_tokens"] == len("one, two")
    chunks = events(shared.post(model="base", prompt="one, two, three", stop=", t", stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "one"
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-1] == "stop"
    shared.wait_until(lambda: shared.worker.stats.num_running == 0)


def test_characters_are_never_split(shared):
    chunks = events(shared.post(model="base", prompt="a€😀", stream=True))
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "€", "😀", ""]


def test_stop_token_ids_and_ignore_eos(shared):
    choice = shared.post(model="base", prompt="abc", stop_token_ids=[98], return_token_ids=True).json()["choices"][0]
    assert choice["text"] == "a" and choice["token_ids"] == [97, 98] and choice["finish_reason"] == "stop"
    choice = shared.post(model="base", prompt="ab", ignore_eos=True, max_tokens=4).json()["choices"][0]
    assert choice["text"] == "ab" and choice["finish_reason"] == "length"
    shown = shared.post(model="base", prompt="ab", ignore_eos=True, max_tokens=3, skip_special_tokens=False).json()
    assert shown["choices"][0]["text"] == "ab<eos>"


def test_add_special_tokens(shared):
    usage = shared.post(model="base", prompt="ab", add_special_tokens=False).json()["usage"]
    assert usage["prompt_tokens"] == 2


def test_token_ids_on_request(shared):
    body = shared.post(model="base", prompt=["ab", "c"], return_token_ids=True).json()
    assert [choice["token_ids"] for choice in body["choices"]] == [[97, 98, EOS], [99, EOS]]
    assert [choice["prompt_token_ids"] for choice in body["choices"]] == [[BOS, 97, 98], [BOS, 99]]
    chunks = events(shared.post(model="base", prompt="a€", return_token_ids=True, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["token_ids"] for choice in choices] == [[97], [0xE2], [0x82], [0xAC], [EOS]]
    assert [choice["text"] for choice in choices] == ["a", "", "", "€", ""]
    assert choices[0]["prompt_token_ids"] == [BOS, *"a€".encode()]
    assert all("prompt_token_ids" not in choice for choice in choices[1:])


def test_step_info_on_request(shared):
    chunks = events(shared.post(model="alice", prompt=["abc", "abc"], return_step_info=True, stream=True))
    assert all(set(chunk["step"]) == {"id", "requests", "adapters", "tokens"} for chunk in chunks)
    assert {chunk["step"]["adapters"] for chunk in chunks} == {1}
    step = shared.post(model="base", prompt="abc", return_step_info=True).json()["step"]
    assert step["requests"] == 1 and step["adapters"] == 0
    assert "step" not in shared.post(model="base", prompt="abc").json()


def test_a_prompt_beyond_the_threshold_is_encoded_on_a_thread(start, fake_engine, make_engine):
    live = start(make_engine([], max_model_len=40_000))
    body = live.post(model="base", prompt="y" * 20_000).json()
    assert body["usage"]["prompt_tokens"] == 20_001


# --- chat ---


def chat(live, **body):
    return live.post("/v1/chat/completions", **{"messages": [{"role": "user", "content": "hi"}], **body})


def test_chat_completion(shared):
    body = chat(shared, model="base").json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "user: hi\nassistant: ", "refusal": None}
    assert choice["finish_reason"] == "stop"
    assert body["usage"]["prompt_tokens"] == len("user: hi\nassistant: ")


def test_chat_content_parts_and_limits(shared):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "user", "content": parts, "name": "x"}, {"role": "assistant", "content": None}]
    body = chat(shared, model="base", messages=messages, max_completion_tokens=9, max_tokens=2).json()
    assert body["choices"][0]["message"]["content"] == "user: a\nb"
    assert body["choices"][0]["finish_reason"] == "length"
    assert chat(shared, model="base", max_tokens=4).json()["choices"][0]["message"]["content"] == "user"


def test_streamed_chat(shared):
    chunks = events(chat(shared, model="base", stream=True, return_token_ids=True, return_step_info=True))
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert bytes(chunks[0]["prompt_token_ids"]) == b"user: hi\nassistant: "
    assert all("step" in chunk for chunk in chunks)
    rest = [chunk["choices"][0] for chunk in chunks[1:]]
    assert "".join(choice["delta"].get("content", "") for choice in rest) == "user: hi\nassistant: "
    assert all("role" not in choice["delta"] for choice in rest)
    assert [choice["finish_reason"] for choice in rest] == [None] * (len(rest) - 1) + ["stop"]
    assert rest[-1]["token_ids"] == [EOS]


def test_chat_defaults_to_the_rest_of_the_context(start, make_engine):
    live = start(make_engine([], max_model_len=60))
    choice = chat(live, model="base", ignore_eos=True).json()
    assert choice["usage"]["total_tokens"] == 60


# --- errors ---

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, {"prompt": "a"}, 400, "model"),
        (COMPLETIONS, {"model": 3, "prompt": "a"}, 400, "model"),
        (COMPLETIONS, {"model": "base"}, 400, "prompt"),
        (COMPLETIONS, {"model": "nobody", "prompt": "a"}, 404, "model"),
        (COMPLETIONS, {"model": "nobody", "prompt": "a", "stream": True}, 404, "model"),
        (CHAT, {"model": "nobody", "messages": USER}, 404, "model"),
        (COMPLETIONS, {"model": "base", "prompt": []}, 400, "prompt"),
        (COMPLETIONS, {"model": "base", "prompt": 5}, 400, "prompt"),
        (COMPLETIONS, {"model": "base", "prompt": {"a": 1}}, 400, "prompt"),
        (COMPLETIONS, {"model": "base", "prompt": ["a", 5]}, 400, "prompt[1]"),
        (COMPLETIONS, {"model": "base", "prompt": [True]}, 400, "prompt[0]"),
        (COMPLETIONS, {"model": "base", "prompt": [97, 10**6]}, 400, "prompt"),
        (COMPLETIONS, {"model": "base", "prompt": [-1]}, 400, "prompt"),
        (COMPLETIONS, {"model": "base", "prompt": ["a"] * 9}, 400, "prompt"),
        (COMPLETIONS, {"model": "base", "prompt": "a" * 600}, 400, "prompt"),
        (COMPLETIONS, {"model": "base", "prompt": ["a", "b" * 600]}, 400, "prompt"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "max_tokens": "many"}, 400, "max_tokens"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "temperature": -1}, 400, "temperature"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "temperature": "hot"}, 400, "temperature"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "top_p": 0}, 400, "top_p"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "top_k": -5}, 400, "top_k"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "seed": 2**70}, 400, "seed"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stop": ""}, 400, "stop"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stop": "x" * 2000}, 400, "stop"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stop": [1]}, 400, "stop[0]"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stream": "perhaps"}, 400, "stream"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stream_options": {}}, 400, "stream_options"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "n": 2}, 400, "n"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "best_of": 3}, 400, "best_of"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "logprobs": 1}, 400, "logprobs"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "echo": True}, 400, "echo"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "suffix": "b"}, 400, "suffix"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "logit_bias": {"5": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "presence_penalty": 0.5}, 400, "presence_penalty"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "frequency_penalty": 0.5}, 400, "frequency_penalty"),
        (CHAT, {"model": "base", "messages": USER, "tools": [{"type": "function"}]}, 400, "tools"),
        (CHAT, {"model": "base", "messages": USER, "logprobs": True}, 400, "logprobs"),
        (CHAT, {"model": "base", "messages": USER, "response_format": {"type": "json_object"}}, 400, "response_format"),
        (CHAT, {"model": "base"}, 400, "messages"),
        (CHAT, {"model": "base", "messages": []}, 400, "messages"),
        (CHAT, {"model": "base", "messages": "hi"}, 400, "messages"),
        (CHAT, {"model": "base", "messages": [{"content": "hi"}]}, 400, "messages[0].role"),
        (CHAT, {"model": "base", "messages": [{"role": "user"}]}, 400, "messages[0]"),
        (CHAT, {"model": "base", "messages": [{"role": "user", "content": 5}]}, 400, "messages[0].content"),
        (
            CHAT,
            {"model": "base", "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "messages[0].content",
        ),
        (CHAT, {"model": "base", "messages": [{"role": "system", "content": "x"}]}, 400, "messages"),
        (CHAT, {"model": "base", "messages": [{"role": "user", "content": "a" * 600}]}, 400, "messages"),
    ],
)
def test_wrong_input_is_named(shared, path, body, status, param):
    response = shared.post(path, **body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param and error["type"] == "invalid_request_error" and error["message"]
    if status == 404:
        assert error["code"] == "model_not_found"
    shared.wait_until(lambda: shared.worker.stats.num_running == 0)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[1]", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"model": "base", "prompt": "\\ud800"}']
)
def test_bodies_that_are_no_request(shared, body):
    response = shared.client.post(COMPLETIONS, content=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_numbers_json_does_not_have(shared):
    response = shared.client.post(COMPLETIONS, content=b'{"model": "base", "prompt": "a", "temperature": NaN}')
    assert response.status_code == 400


def test_a_body_too_large(start, fake_engine):
    live = start(fake_engine, max_body_bytes=2048)
    response = live.post(model="base", prompt="x" * 4000)
    assert response.status_code == 413 and response.json()["error"]["type"] == "invalid_request_error"


def test_unknown_routes_and_methods(shared):
    response = shared.client.get("/v2/nothing")
    assert response.status_code == 404 and "/v2/nothing" in response.json()["error"]["message"]
    response = shared.client.get(COMPLETIONS)
    assert response.status_code == 405 and response.json()["error"]["type"] == "invalid_request_error"
    assert "POST" in response.headers["allow"]


def test_an_engine_error_is_a_500_and_an_event_in_a_stream(shared):
    poison = [97, 0]
    response = shared.post(model="base", prompt=poison)
    assert response.status_code == 500 and response.json()["error"]["message"] == "poisoned"
    assert events(shared.post(model="base", prompt=poison, stream=True))[-1]["error"]["type"] == "server_error"


def test_one_bad_prompt_of_many_takes_the_others_with_it(shared):
    assert shared.post(model="base", prompt=[[97] * 300, [0]], max_tokens=300).status_code == 500
    shared.wait_until(lambda: shared.worker.stats.num_running == 0)


def test_unforeseen_errors_are_500_without_details(start, fake_engine):
    live = start(fake_engine)
    fake_engine.store.describe = lambda: 1 / 0
    response = live.client.get("/v1/models")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error" and "zero" not in response.text


# --- the rest ---


def test_models(shared):
    cards = shared.client.get("/v1/models").json()["data"]
    assert [card["id"] for card in cards] == ["base", "alice", "bob"]
    assert [card["parent"] for card in cards] == [None, "base", "base"]
    assert cards[0]["root"] == "/models/base" and cards[1]["root"] == "/adapters/alice"
    assert shared.client.get("/v1/models/bob").json()["id"] == "bob"
    assert shared.client.get("/v1/models/none").json()["error"]["code"] == "model_not_found"


def test_health_and_version(shared):
    body = shared.client.get("/health").json()
    assert body["status"] == "ok" and body["stats"]["num_pages"] == 100
    assert shared.client.get("/version").json()["version"]


def test_metrics(start, fake_engine):
    live = start(fake_engine)
    live.post(model="alice", prompt="abc")
    live.post(model="base", prompt="abcdef", max_tokens=2)
    live.post(model="nobody", prompt="abc")
    text = live.client.get("/metrics").text
    lines = text.splitlines()
    assert 'chorus_requests_total{finish_reason="stop",model="alice"} 1.0' in lines
    assert 'chorus_requests_total{finish_reason="length",model="base"} 1.0' in lines
    assert 'chorus_generated_tokens_total{model="alice"} 4.0' in lines
    assert 'chorus_prompt_tokens_total{model="base"} 7.0' in lines
    assert "chorus_steps_total 6.0" in lines
    assert 'chorus_pages{kind="free"} 100.0' in lines
    assert "chorus_last_step_adapters 0.0" in lines
    assert "chorus_time_to_first_token_seconds_count 2.0" in lines
    assert "chorus_inter_token_latency_seconds_count 4.0" in lines
    assert "chorus_request_seconds_count 2.0" in lines
    assert "nobody" not in text


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
        client.completions.create(model="base", prompt="x", n=2)
    assert caught.value.param == "n"
    with pytest.raises(openai.APIError):
        list(client.completions.create(model="base", prompt=[97, 0], stream=True))
