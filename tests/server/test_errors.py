"""A request's fault is told in OpenAI's shape, and names the field."""

import ast
import re
from pathlib import Path

import pytest

from chorus.core.requests.types import FinishReason, RequestOutput
from chorus.memory.files.error import LoadFailure
from chorus.server.errors import GenerationFailed, PrivatePaths, as_api_error

pytestmark = pytest.mark.wide

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, {"model": "", "prompt": "a"}, 400, "model"),
        (COMPLETIONS, {"model": "x" * 257, "prompt": "a"}, 400, "model"),
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
        (COMPLETIONS, {"model": "base", "prompt": "a", "top_p": -0.1}, 400, "top_p"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "top_k": -5}, 400, "top_k"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "seed": 2**70}, 400, "seed"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stop": [""]}, 400, "stop"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stop": ["x"] * 17}, 400, "stop"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stop": "x" * 2000}, 400, "stop"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stop": [1]}, 400, "stop[0]"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stream": "perhaps"}, 400, "stream"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "stream_options": {}}, 400, "stream_options"),
        (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": {"often": 1}}, 400, "stream_options.often"),
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
        (COMPLETIONS, {"model": "base", "prompt": "a", "logprobs": 21}, 400, "logprobs"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "cache_salt": "x" * 257}, 400, "cache_salt"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "request_id": "a b"}, 400, "request_id"),
        (COMPLETIONS, {"model": "base", "prompt": "a", "tempreature": 0}, 400, "tempreature"),
        (
            CHAT,
            {"model": "base", "messages": USER, "tools": [{"type": "function"}], "tool_choice": "auto"},
            400,
            "tools[0]",
        ),
        (CHAT, {"model": "base", "messages": USER, "tool_choice": "required"}, 400, "tool_choice"),
        (
            CHAT,
            {"model": "base", "messages": USER, "chat_template_kwargs": {"tokenize": True}},
            400,
            "chat_template_kwargs",
        ),
        (CHAT, {"model": "base", "messages": USER, "best_of": 2}, 400, "best_of"),
        (CHAT, {"model": "base", "messages": USER, "n": 9}, 400, "n"),
        (CHAT, {"model": "base", "messages": USER, "top_logprobs": 2}, 400, "top_logprobs"),
        (CHAT, {"model": "base", "messages": USER, "logprobs": True, "top_logprobs": 101}, 400, "top_logprobs"),
        (CHAT, {"model": "base", "messages": USER, "tools": [{"type": "function"}]}, 400, "tools[0]"),
        (CHAT, {"model": "base", "messages": USER, "logprobs": 5}, 400, "logprobs"),
        (CHAT, {"model": "base", "messages": USER, "response_format": {"type": "yaml"}}, 400, "response_format"),
        (CHAT, {"model": "base", "messages": USER, "guided_choice": [1]}, 400, "guided_choice[0]"),
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


def test_all_wrong_keys_of_a_logit_bias_are_named(shared):
    message = shared.post(COMPLETIONS, prompt="a", logit_bias={"bad1": 1, "5": 1, "bad2": 1}).json()["error"]["message"]
    assert "'bad1', 'bad2'" in message and "'5'" not in message


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


@pytest.mark.parametrize(
    ("failure", "status", "param"),
    [
        ("UNREADABLE", 503, "model"),
        ("TIMEOUT", 503, "model"),
        ("CHANGED", 424, "model"),
        ("INVALID", 424, "model"),
        ("NO_ROOM", 503, None),
    ],
)
def test_what_adapters_keep_from_running_is_no_500(start, fake_engine, read_events, failure, status, param):
    failure = LoadFailure[failure]
    fake_engine.advance = lambda request, _: RequestOutput(
        request.id, (), FinishReason.ERROR, error="/srv/secret/alice/x.safetensors: cannot be read", failure=failure
    )
    live = start(fake_engine)
    response = live.post(model="alice", prompt="a")
    error = response.json()["error"]
    assert response.status_code == status and error["code"] == failure and error["param"] == param
    assert ("retry-after" in response.headers) == (status == 503)
    assert error["message"] == "x.safetensors: cannot be read"
    assert read_events(live.post(model="alice", prompt="a", stream=True))[-1]["error"] == error


def test_who_waited_for_an_engine_that_hangs_is_told_to_come_again(start, fake_engine):
    live = start(fake_engine, settings={"stall_seconds": 0.2, "give_up_seconds": 0.5})
    fake_engine.gate.clear()
    answer = live.post(model="base", prompt="a")
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "engine_unavailable"
    assert "cancelled" in answer.json()["error"]["message"]
    fake_engine.gate.set()


def test_one_bad_prompt_of_many_takes_the_others_with_it(shared):
    assert shared.post(model="base", prompt=[[97] * 300, [0]], max_tokens=200).status_code == 500
    shared.wait_until(lambda: shared.worker.stats.num_running == 0)


def test_unforeseen_errors_are_500_without_details(start, fake_engine):
    live = start(fake_engine)
    fake_engine.store.registered = lambda: 1 / 0
    for sent in ({"x-request-id": "mine"}, {}):
        response = live.client.get("/v1/models", headers={"connection": "close", **sent})
        assert response.status_code == 500
        assert response.json()["error"].keys() == {"message", "type", "param", "code"}
        assert response.json()["error"]["type"] == "server_error" and "zero" not in response.text
        assert response.headers["x-request-id"] == sent.get("x-request-id", response.headers["x-request-id"]) != ""


@pytest.mark.parametrize(
    ("path", "body", "what"),
    [
        (COMPLETIONS, {"prompt": "a" * 600}, "prompt"),
        (COMPLETIONS, {"prompt": [97] * 512}, "prompt"),
        (COMPLETIONS, {"prompt": ["a", "b" * 600]}, "prompt"),
        (CHAT, {"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
    ],
)
def test_a_prompt_beyond_the_context_is_told_in_openais_words(shared, path, body, what):
    error = shared.post(path, **body).json()["error"]
    assert error["code"] == "context_length_exceeded" and error["param"] == what
    assert error["message"].startswith("This model's maximum context length is 512 tokens. However, ")
    assert f"reduce the length of the {what}" in error["message"]


@pytest.mark.parametrize("prompt", ["a" * 600, "a" * 60_000, list(range(100, 200)) * 6])
def test_a_prompt_beyond_a_sliding_window_is_told_of_the_window(fake_engine, start, prompt):
    fake_engine.model.window = 512
    error = start(fake_engine).post(prompt=prompt).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 512 tokens. However, ")
    assert "sliding window of 512 tokens" in error["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "model": "n" * 250}),
        (COMPLETIONS, {"prompt": "a", "model": "n" * 5000}),
        (COMPLETIONS, {"prompt": "a", "k" * 5000: 1}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"k" * 5000: 1}}),
        (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": "much", "k" * 5000: "x"}}),
        (COMPLETIONS, {"prompt": "a", "stream_options": {"k" * 5000: 1}, "stop": {"k" * 5000: 1}}),
        (CHAT, {"messages": [{"role": "system", "content": "p" * 5000}]}),
        (CHAT, {"messages": [{"role": "p" * 5000, "content": "a", "k" * 5000: 1}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "p" * 5000, "k" * 5000: 1}]}]}),
        (CHAT, {"messages": USER, "chat_template_kwargs": {"k" * 5000: 1, "tokenize": 1}}),
        ("/" + "p" * 5000, {}),
    ],
)
def test_no_error_repeats_more_than_200_characters(shared, path, body):
    response = shared.post(path, **body)
    assert 400 <= response.status_code < 500, response.text
    error = response.json()["error"]
    assert len(error["message"]) < 400 and len(error["param"] or "") <= 200
    assert not any(run * 201 in response.text for run in "kpn")


def test_where_files_are_is_not_told():
    reason = "adapter 'a' changed: /srv/secret place/adapters/a/adapter_model.safetensors, see /var/log/x.log"
    message = as_api_error(
        GenerationFailed("can't read /srv/secret/adapters/a/adapter_model.safetensors: gone")
    ).message
    assert message == "can't read adapter_model.safetensors: gone"
    assert "/srv" not in as_api_error(GenerationFailed(reason)).message


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_a_429_that_says_when_to_come_back(start, fake_engine, stream):
    fake_engine.refuse_from = 2
    fake_engine.gate.clear()
    live = start(fake_engine)
    response = live.post(prompt="hi", n=4, stream=stream, max_tokens=4)
    assert response.status_code == 429, response.text
    assert response.headers["retry-after"] == "3"
    assert response.json()["error"]["type"] == "rate_limit_error" and response.json()["error"]["code"] == "overloaded"
    fake_engine.gate.set()
    live.wait_until(lambda: not fake_engine.running)
    assert fake_engine.asked == [], "the room for all is looked at before any is made"
    counted = 'vllm:admission_rejections_total{model_name="base",reason="max_num_queued_reqs"} 1.0'
    assert counted in live.client.get("/metrics").text.splitlines()


def test_the_manual_has_every_code():
    root = Path(__file__).resolve().parents[2]
    page = (root / "docs" / "reference" / "errors.md").read_text("utf-8")
    told = {code for names in re.findall(r"^\* (.*?): ", page, re.MULTILINE) for code in re.findall(r"`(\w+)`", names)}
    used = {str(failure) for failure in LoadFailure}
    for path in (root / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.keyword) and node.arg == "code":
                used |= {each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant) and each.value}
    assert used - told == set()


@pytest.mark.parametrize("given", ["ad", "./ad", "../stores/ad", "/stores/ad", Path("ad")])
def test_a_reason_names_files_from_the_adapters_directory_on(given):
    path = Path(given) / "bad" / "adapter_config.json"
    text = PrivatePaths([Path(given)]).hide(f"adapter 'ad/bad' is not served: {path}: r is 0 ({path}), load/bad/x")
    shown = "bad/adapter_config.json"
    assert text == f"adapter 'ad/bad' is not served: {shown}: r is 0 ({shown}), load/bad/x"


def test_a_directory_that_is_the_present_one_hides_nothing_else():
    assert PrivatePaths([Path()]).hide("a./b and c/d") == "a./b and c/d"
