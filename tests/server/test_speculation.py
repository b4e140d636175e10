"""Speculation over HTTP: the responses are those without, and usage and metrics count the proposed tokens."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any, cast

import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from chorus.server.text.tokenizer import Tokenizer

from ..core.speculation.stand_ins import Free
from .conftest import live_server

pytestmark = pytest.mark.wide

PROMPT = "abcabcabcabcabcabc\n"
DETAILS = "completion_tokens_details"
ASKED: list[dict[str, Any]] = [
    {},
    {"model": "reverse"},
    {"model": "upper", "temperature": 1, "seed": 3},
    {"n": 3, "temperature": 1.5, "seed": 4},
    {"stop": ["cab"]},
    {"stop": ["bca", "B"], "model": "upper", "include_stop_str_in_output": True},
    {"logprobs": 2, "prompt_logprobs": 1},
    {"ignore_eos": True, "max_tokens": 60},
    {"min_tokens": 30, "max_tokens": 40},
    {"repetition_penalty": 1.1},
    {"guided_regex": "[a-c]{4,9}"},
    {"return_token_ids": True, "max_tokens": 7},
]


@pytest.fixture(scope="module")
def servers():
    """Without speculation, and with it."""
    with ExitStack() as stack:
        found = []
        for speculation in ("off", "ngram"):
            config = EngineConfig(
                model=BUILTIN_MODEL,
                adapters=BUILTIN_ADAPTERS,
                device="cpu",
                dtype="float32",
                threads=1,
                memory_bytes=16 << 20,
                speculation=speculation,
            )
            engine = cast(Any, Engine.from_config(config))
            assert engine.model.speculates is (speculation == "ngram")
            if engine.speculation is not None:
                engine.speculation.cost = Free()
            settings = {"model": BUILTIN_MODEL, "served_model_name": "base", "speculation": speculation}
            found.append(stack.enter_context(live_server(engine, Tokenizer.load(BUILTIN_MODEL), settings=settings)))
        yield found


def ask(live, **body):
    body = {"model": "base", "prompt": PROMPT, "temperature": 0, "max_tokens": 50, **body}
    response = live.post(**body)
    assert response.status_code == 200, response.text
    return response


def without_ids(answer):
    """An answer without what no two answers share, and the details of its usage."""
    for key in ("id", "created"):
        answer.pop(key)
    usage = answer.get("usage") or {}
    usage.pop("prompt_tokens_details", None)  # another request may have filled the cache
    return answer, usage.pop(DETAILS, None)


@pytest.mark.parametrize("body", ASKED, ids=str)
def test_answers_are_those_without_speculation(servers, body):
    (plain, none), (found, details) = (without_ids(ask(live, **body).json()) for live in servers)
    if "logprobs" in body:
        assert json.dumps(found)  # the native decoder gives equal bits, torch's operators nearly so
        for answer in (plain, found):
            for choice in answer["choices"]:
                choice["logprobs"], choice["prompt_logprobs"] = choice["logprobs"]["tokens"], None
    assert found == plain
    assert none == {"accepted_prediction_tokens": 0, "rejected_prediction_tokens": 0}
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    assert 0 <= accepted < found["usage"]["completion_tokens"] and rejected >= 0
    assert not ("repetition_penalty" in body and accepted + rejected)


@pytest.mark.parametrize("body", [{}, {"model": "reverse", "stop": ["cba"]}, {"n": 2, "temperature": 1}], ids=str)
def test_streams_have_the_chunks_of_streams_without_speculation(servers, body):
    """A chunk for each token, and the counts at the end."""
    body = {**body, "stream": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    read = []
    for live in servers:
        lines = [line for line in ask(live, **body).text.splitlines() if line.startswith("data: {")]
        chunks = [without_ids(json.loads(line.removeprefix("data: ")))[0] for line in lines]
        # choices come in turns, which differ
        read.append(sorted(json.dumps(chunk["choices"]) for chunk in chunks))
        assert chunks[-1]["usage"]["completion_tokens"] >= 3
    assert read[0] == read[1]


def test_chat_counts_reasoning_and_proposed_tokens(servers):
    for live in servers:
        messages = [{"role": "user", "content": "aaaaaaaaaaaaaaaa"}]
        answer = live.post("/v1/chat/completions", model="base", messages=messages, temperature=0, max_tokens=40).json()
        assert answer["usage"][DETAILS].keys() == {
            "reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens",
        }  # fmt: skip


def test_metrics_count_what_usage_counts(servers):
    """Every proposed token was accepted or rejected in some answer that ended by itself."""
    plain, live = servers

    def counts(server):
        text = server.client.get("/metrics").text
        lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return [
            sum(
                float(value)
                for name, value in lines.items()
                if name.startswith(f"chorus_speculation_{kind}_tokens_total")
            )
            for kind in ("proposed", "accepted")
        ]

    before = counts(live)
    usage = ask(live, ignore_eos=True, max_tokens=100).json()["usage"]
    accepted, rejected = (usage[DETAILS][f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected"))
    assert accepted > 30
    assert [new - old for new, old in zip(counts(live), before, strict=True)] == [accepted + rejected, accepted]
    assert counts(plain) == [0, 0]


def counts_of(response):
    details = response.json()["usage"][DETAILS]
    return [details[f"{kind}_prediction_tokens"] for kind in ("accepted", "rejected")]


@pytest.mark.parametrize(
    "prediction",
    [
        {"type": "content", "content": "ihgfedcba"},
        {"type": "content", "content": [{"type": "text", "text": "ihgf"}, {"type": "text", "text": "edcba"}]},
    ],
    ids=["text", "parts"],
)
def test_a_prediction_is_accepted_and_changes_no_answer(servers, prediction):
    """The prompt has no token twice, so that only the prediction can be proposed from."""
    body = {"model": "reverse", "prompt": "abcdefghi\n", "max_tokens": 9, "ignore_eos": True}
    for live, speculates in zip(servers, (False, True), strict=True):
        plain, predicted = ask(live, **body), ask(live, **body, prediction=prediction)
        assert predicted.json()["choices"] == plain.json()["choices"]
        assert plain.json()["choices"][0]["text"].startswith("ihgfedcb")
        assert (counts_of(predicted)[0] > 4) == speculates
        assert counts_of(plain) == [0, 0]
        assert predicted.headers.get("x-ignored-fields") == (None if speculates else "prediction")


def test_a_wrong_prediction_counts_as_rejected(servers):
    body = {"model": "reverse", "prompt": "abcdefghi\n", "max_tokens": 9}
    answer = ask(servers[1], **body, prediction={"type": "content", "content": "i" + "q" * 20})
    assert answer.json()["choices"][0]["text"].strip() == "ihgfedcba"
    assert counts_of(answer)[0] == 0 < counts_of(answer)[1]


def test_chat_and_streams_take_a_prediction(servers):
    body = {"model": "base", "messages": [{"role": "user", "content": "abcdef"}], "temperature": 0, "max_tokens": 12}
    for live in servers:
        plain = live.post("/v1/chat/completions", **body).json()["choices"][0]["message"]["content"]
        predicted = {"prediction": {"type": "content", "content": plain}}
        answer = live.post("/v1/chat/completions", **body, **predicted).json()
        assert answer["choices"][0]["message"]["content"] == plain
        stream = live.post("/v1/chat/completions", **body, **predicted, stream=True)
        lines = [json.loads(line[6:]) for line in stream.text.splitlines() if line.startswith("data: {")]
        assert "".join(line["choices"][0]["delta"].get("content") or "" for line in lines if line["choices"]) == plain


@pytest.mark.parametrize(
    ("prediction", "field"),
    [
        ("text", "prediction"),
        ({"content": "a"}, "prediction.type"),
        ({"type": "tokens", "content": "a"}, "prediction.type"),
        ({"type": "content"}, "prediction.content"),
        ({"type": "content", "content": 5}, "prediction.content"),
        ({"type": "content", "content": ["a"]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "image_url", "image_url": "x"}]}, "prediction.content"),
        ({"type": "content", "content": [{"type": "text", "text": "a", "id": 1}]}, "prediction.content"),
        ({"type": "content", "content": "a", "more": 1}, "prediction.more"),
    ],
    ids=str,
)
def test_a_prediction_of_another_shape_is_refused(servers, prediction, field):
    for live in servers:
        response = live.post(model="base", prompt="a", prediction=prediction)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field


def test_a_prediction_longer_than_the_context_is_refused(servers):
    long = {"type": "content", "content": "abc " * 4000}
    response = servers[1].post(model="base", prompt="a", prediction=long)
    assert response.status_code == 400 and response.json()["error"]["param"] == "prediction"
