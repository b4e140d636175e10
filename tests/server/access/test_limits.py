"""The cost of a request is known, and refused, before anything of it is done."""

import asyncio
import json
import threading
import time
from typing import Any

import httpx
import pytest

from chorus.server.access.limits import MAX_DEPTH, RequestLimits, check_json
from chorus.server.api.chat_request import ChatBatch, ChatCompletionRequest
from chorus.server.api.completion_request import CompletionRequest
from chorus.server.api.responses_request import ResponsesRequest
from chorus.server.errors import ApiError
from chorus.server.text.conversation import Conversation

pytestmark = pytest.mark.wide

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture
def priced(start, make_engine):
    """A server whose model has a long context, with the default limits."""
    return start(make_engine(["alice"], max_model_len=4096))


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (COMPLETIONS, {"prompt": ["x" * 2000] * 8, "echo": True, "logprobs": 20}, "logprobs"),
        (COMPLETIONS, {"prompt": ["x" * 2000] * 8, "max_tokens": 1, "prompt_logprobs": 20}, "prompt_logprobs"),
        (CHAT, {"messages": USER, "n": 8, "max_tokens": 4000, "logprobs": True, "top_logprobs": 20}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "n": 8, "logprobs": 20, "max_tokens": 4000}, "logprobs"),
        (COMPLETIONS, {"prompt": "x", "bad_words": ["a"] * 257}, "bad_words"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 17}, "stop"),
        (COMPLETIONS, {"prompt": "x", "n": 8, "stop": ["a" * 1024] * 2}, "stop"),
        (
            COMPLETIONS,
            {"prompt": "x", "n": 8, "logit_bias": {str(i): 1 for i in range(1024)}, "bad_words": ["q"]},
            "logit_bias",
        ),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        (COMPLETIONS, {"prompt": "x", "stop_token_ids": [1] * 1025}, "stop_token_ids"),
        (COMPLETIONS, {"prompt": "x", "allowed_token_ids": [1] * 16385}, "allowed_token_ids"),
        (CHAT, {"messages": USER * 1025}, "messages"),
        (CHAT, {"messages": [{}] * 2000}, "messages"),
    ],
)
def test_what_costs_too_much_is_refused(priced, path, body, param):
    response = priced.post(path, **body)
    assert response.status_code == 400, response.text[:500]
    assert response.json()["error"]["param"] == param
    assert priced.engine.asked == []


ITEMS: list[dict[str, Any]] = [
    {"role": "system", "content": "x" * 250},
    {"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": "%s"}' % ("x" * 80)},
]


@pytest.mark.parametrize("item", ITEMS, ids=["system", "calls"])
def test_items_that_become_one_message_take_time_by_their_number(item):
    """Not by its square: 6.0 and 2.1 seconds."""
    body = json.dumps({"input": [item] * 25_000}).encode()
    began = time.process_time()
    (message,) = ResponsesRequest.parse(body, RequestLimits()).chat.messages
    assert time.process_time() - began < 1
    assert len(message.content or "") == 25_000 * 252 - 2 or len((message.model_extra or {})["tool_calls"]) == 25_000


def test_what_conversations_have_in_common_is_read_once():
    """Tools of 200 KB with each of 20,000 conversations took minutes."""
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "d" * 1500}} for i in range(128)]
    began = time.process_time()
    body = {"messages": [USER] * 128, "tools": tools}
    batch = ChatBatch.parse(json.dumps(body).encode(), RequestLimits())
    assert len(batch.conversations) == 128 and all(len(one.tools) == 128 for one in batch.conversations)
    with pytest.raises(ApiError, match="at most 128 conversations are allowed in one request, got 20000") as refused:
        ChatBatch.parse(json.dumps({**body, "messages": [USER] * 20_000}).encode(), RequestLimits())
    assert refused.value.param == "messages" and time.process_time() - began < 1
    for wrong in ([], [{}], USER * 1025, [*USER, {"role": "assistant", "content": ""}]):
        with pytest.raises(ApiError, match="message") as refused:
            given = {"messages": [[*USER, {"role": "assistant", "content": "a"}], wrong]}
            ChatBatch.parse(json.dumps({**given, "continue_final_message": True}).encode(), RequestLimits())
        assert refused.value.status == 400


def test_no_more_functions_are_allowed_than_there_may_be(priced):
    names = [{"type": "function", "function": {"name": "f"}}] * 129
    choice = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": names}}
    refused = priced.post(CHAT, messages=USER, tools=names[:1], tool_choice=choice).json()["error"]
    assert refused["param"] == "tool_choice" and "names 129 functions" in refused["message"]


def test_calls_of_a_message_are_written_beside_the_event_loop(tokenizer, monkeypatch):
    """25,000 of them in one message without content took seconds, in which nothing else was answered."""
    threads = []
    monkeypatch.setattr(tokenizer, "encode_chat_now", lambda *_: threads.append(threading.current_thread()) or [1])
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {}}}
    for more in ({}, {"tool_calls": [call]}, {"reasoning_content": "a"}):
        asyncio.run(tokenizer.encode_chat(Conversation([*USER, {"role": "assistant", "content": "", **more}])))
    assert [thread is threading.main_thread() for thread in threads] == [True, False, False]


def test_prompts_times_answers_are_bounded(start, make_engine):
    live = start(make_engine([], max_model_len=4096), settings={"max_call_tokens": 10_000})
    assert live.post(prompt=[97] * 1500, n=6, max_tokens=1).status_code == 200
    response = live.post(prompt=[97] * 1500, n=7, max_tokens=1)
    assert response.status_code == 400 and response.json()["error"]["param"] == "n"


def test_an_unasked_length_is_cut_to_the_scores_that_can_be_given(start, make_engine):
    engine = make_engine([], max_model_len=4096)
    live = start(engine, settings={"max_scores": 4200})
    body = {"messages": USER, "logprobs": True, "top_logprobs": 9}
    assert live.post(CHAT, **body).status_code == 200
    assert engine.asked[0].params.max_tokens == 420
    assert live.post(CHAT, **body, n=2).status_code == 400, "210 tokens are no answer"
    assert live.post(CHAT, **body, n=2, max_tokens=200).status_code == 200


def test_a_long_text_is_refused_before_it_is_tokenized(priced, tokenizer, monkeypatch):
    seen = []
    encode = tokenizer.backend.encode_batch_fast

    class Spy:
        def __init__(self, backend):
            self._backend = backend

        def __getattr__(self, name):
            return getattr(self._backend, name)

        def encode_batch_fast(self, texts, **options):
            seen.append(max(map(len, texts)))
            return encode(texts, **options)

    monkeypatch.setattr(tokenizer, "backend", Spy(tokenizer.backend))
    most = 4096 * tokenizer.vocabulary.longest_token
    for path, body in (
        (COMPLETIONS, {"prompt": "x" * (most + 1)}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * (most + 1)}]}),
    ):
        error = priced.post(path, **body).json()["error"]
        assert error["code"] == "context_length_exceeded"
    assert seen == []
    priced.post(prompt="short")
    assert seen == [5]


@pytest.mark.parametrize("kind", [CompletionRequest, ChatCompletionRequest])
@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"prompt": [' + b"1," * 200_000 + b"1]}",
        b'{"messages": [' + b"{}," * 200_000 + b"{}]}",
        b'{"messages": [' + b'"",' * 400_000 + b'""]}',
    ],
)
def test_a_body_with_too_much_in_it_is_refused_before_it_is_parsed(kind, body, monkeypatch):
    monkeypatch.setattr(kind, "model_validate_json", None)
    with pytest.raises(ApiError) as caught:
        kind.parse(body, RequestLimits())
    assert caught.value.status == 400


@pytest.mark.parametrize("text", ["[{,", '"[[[[,,,,{{{{"', "\\\\", '\\"', "a,b" * 1000, "[" * 500, '\\\\"[' * 100])
def test_what_is_in_texts_does_not_count(text):
    body = json.dumps({"prompt": text, "stop": [text]}).encode()
    check_json(body, 16)
    json.loads(body)


def test_nesting_is_counted_where_it_closes():
    check_json(json.dumps([[1]] * 100).encode(), 1000)
    deep = b"[" * MAX_DEPTH + b"]" * MAX_DEPTH
    check_json(deep, 1000)
    with pytest.raises(ApiError):
        check_json(b"[" + deep + b"]", 1000)


@pytest.mark.wide
def test_a_large_answer_does_not_hold_up_the_others(start, make_engine):
    """While 90,000 log-probabilities are written, /health is answered again and again."""
    live = start(make_engine([], max_model_len=4200), settings={"max_scores": 200_000})
    body = {"prompt": "x" * 4100, "echo": True, "logprobs": 20, "max_tokens": 1}
    answers = []
    import threading

    asking = threading.Thread(target=lambda: answers.append(live.post(**body).json()))
    asking.start()
    polls = 0
    deadline = time.monotonic() + 60
    with httpx.Client(base_url=live.url, timeout=60) as client:
        while asking.is_alive() and time.monotonic() < deadline:
            assert client.get("/health").status_code == 200
            polls += 1
    asking.join(60)
    assert len(answers[0]["choices"][0]["logprobs"]["tokens"]) == 4102 and polls >= 3


@pytest.mark.parametrize("stream", [False, True])
def test_large_answers_are_written_beside_the_event_loop(start, make_engine, monkeypatch, stream, read_events):
    import threading

    from chorus.server.api import logprobs

    writers = set()
    named = logprobs.LogprobFormat.named

    def spy(self, *args):
        writers.add(threading.current_thread().name)
        return named(self, *args)

    monkeypatch.setattr(logprobs.LogprobFormat, "named", spy)
    live = start(make_engine([], max_model_len=4200))
    body = {"prompt": "x" * 1000, "echo": True, "logprobs": 20, "max_tokens": 1, "stream": stream}
    response = live.post(**body)
    choice = read_events(response)[0]["choices"][0] if stream else response.json()["choices"][0]
    assert len(choice["logprobs"]["top_logprobs"]) == 1002
    assert writers and all(name.startswith("chorus-text") for name in writers)
