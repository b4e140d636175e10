"""What is wrong with a request is said in OpenAI's shape, and names the field."""

import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
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
        (COMPLETIONS, {"model": "base", "prompt": "a", "n": 0}, 400, "n"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "n": 9}, 400, "n"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "n": 10**15}, 400, "n"),
        (COMPLETIONS, {"model": "base", "prompt": ["a", "b", "c"], "n": 3}, 400, "n"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "n": 2, "best_of": 1}, 400, "best_of"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "best_of": 3}, 400, "best_of"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "logprobs": 101}, 400, "logprobs"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "logprobs": -1}, 400, "logprobs"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "logprobs": "all"}, 400, "logprobs"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "top_logprobs": 1}, 400, "top_logprobs"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "prompt_logprobs": -1}, 400, "prompt_logprobs"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "echo": "maybe"}, 400, "echo"),
        (COMPLETIONS, {"model": "base", "prompt": [[10**6]], "echo": True}, 400, "prompt"),
        (COMPLETIONS, {"model": "base", "prompt": [[-1]], "echo": True, "logprobs": 1}, 400, "prompt"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "suffix": "b"}, 400, "suffix"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "logit_bias": {"-1": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "logit_bias": {"5": "much"}}, 400, "logit_bias.5"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "logit_bias": [5]}, 400, "logit_bias"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "presence_penalty": 2.5}, 400, "presence_penalty"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "frequency_penalty": -3}, 400, "frequency_penalty"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "repetition_penalty": 0}, 400, "repetition_penalty"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "min_p": 1.5}, 400, "min_p"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "min_tokens": 17}, 400, "min_tokens"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "bad_words": [""]}, 400, "bad_words"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "bad_words": ["x" * 2000]}, 400, "bad_words"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "bad_words": "x"}, 400, "bad_words"),
        (
            COMPLETIONS,
            {"model": "base", "prompt": "a", "return_tokens_as_token_ids": True},
            400,
            "return_tokens_as_token_ids",
        ),
        (COMPLETIONS, {"model": "base", "prompt": "a", "allowed_token_ids": [5]}, 400, "allowed_token_ids"),
        (CHAT, {"model": "base", "messages": USER, "echo": True}, 400, "echo"),
        (CHAT, {"model": "base", "messages": USER, "best_of": 2}, 400, "best_of"),
        (CHAT, {"model": "base", "messages": USER, "n": 9}, 400, "n"),
        (CHAT, {"model": "base", "messages": USER, "top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"model": "base", "messages": USER, "logprobs": True, "top_logprobs": 101}, 400, "top_logprobs"),
        (CHAT, {"model": "base", "messages": USER, "tools": [{"type": "function"}]}, 400, "tools"),
        (CHAT, {"model": "base", "messages": USER, "logprobs": 5}, 400, "logprobs"),
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
    response = shared.client.post(COMPLETIONS, content=body, headers=JSON)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["type"] == "invalid_request_error"


def test_numbers_json_does_not_have(shared):
    response = shared.client.post(
        COMPLETIONS, content=b'{"model": "base", "prompt": "a", "temperature": NaN}', headers=JSON
    )
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


def test_an_engine_error_is_a_500_and_an_event_in_a_stream(shared, read_events):
    poison = [97, 0]
    response = shared.post(model="base", prompt=poison)
    assert response.status_code == 500 and response.json()["error"]["message"] == "poisoned"
    assert read_events(shared.post(model="base", prompt=poison, stream=True))[-1]["error"]["type"] == "server_error"


def test_one_bad_prompt_of_many_takes_the_others_with_it(shared):
    assert shared.post(model="base", prompt=[[97] * 300, [0]], max_tokens=300).status_code == 500
    shared.wait_until(lambda: shared.worker.stats.num_running == 0)


def test_unforeseen_errors_are_500_without_details(start, fake_engine):
    live = start(fake_engine)
    fake_engine.store.names = lambda: 1 / 0
    response = live.client.get("/v1/models")
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error" and "zero" not in response.text
