"""Structured output in every peer's syntax, refusals, and OpenAI's client as a user."""

from __future__ import annotations

import json
import shutil
import time
from typing import Any, cast

import openai
import pytest
from pydantic import BaseModel, Field
from transformers import PreTrainedTokenizerFast

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.core.requests.grammar import Grammar
from chorus.server.text.tokenizer import Tokenizer
from tests.server.conftest import CHAT_TEMPLATE, FakeEngine, live_server
from tests.tiny_tokenizer import save_tokenizer

pytestmark = pytest.mark.wide

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"é": {"type": "integer"}}, "required": ["é"]}
TEXT = json.dumps(SCHEMA, ensure_ascii=False)
TAG = {"structures": [{"begin": "<f>", "schema": {"type": "integer"}, "end": "</f>"}], "triggers": ["<f"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def live(tokenizer, model):
    with live_server(FakeEngine(["alice"]), tokenizer, settings={"model": model}) as live:
        yield live


ASKED = [
    ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, Grammar("json_schema", TEXT)),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": None, "schema": SCHEMA}}},
        Grammar("json_schema", TEXT),
    ),
    ({"response_format": {"type": "structural_tag", **TAG}}, Grammar("structural_tag", json.dumps(TAG))),
    ({"structured_outputs": {"json": SCHEMA}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"json": TEXT, "disable_fallback": True}}, Grammar("json_schema", TEXT)),
    ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+")),
    ({"structured_outputs": {"choice": ["a", "é"]}}, Grammar("choice", '["a", "é"]')),
    ({"structured_outputs": {"grammar": 'root ::= "a"'}}, Grammar("grammar", 'root ::= "a"')),
    ({"structured_outputs": {"json_object": True, "regex": None}}, Grammar("json_object")),
    ({"structured_outputs": {"json": {}, "json_object": False}}, Grammar("json_schema", "{}")),
    ({"structured_outputs": {"structural_tag": json.dumps(TAG)}}, Grammar("structural_tag", json.dumps(TAG))),
    ({"guided_json": SCHEMA}, Grammar("json_schema", TEXT)),
    ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ({"guided_choice": ["a", "b"]}, Grammar("choice", '["a", "b"]')),
    ({"guided_grammar": 'start: "a"'}, Grammar("grammar", 'start: "a"')),
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"ebnf": 'root ::= "a"'}, Grammar("grammar", 'root ::= "a"')),
    ({"json_schema": TEXT}, Grammar("json_schema", TEXT)),
    ({"grammar": 'root ::= "a"', "regex": None}, Grammar("grammar", 'root ::= "a"')),
    ({"guided_json": {}}, Grammar("json_schema", "{}")),
    ({"json_schema": {}, "grammar": ""}, Grammar("json_schema", "{}")),
    ({"structural_tag": json.dumps(TAG)}, Grammar("structural_tag", json.dumps(TAG))),
    ({"response_format": {"type": "text"}, "structured_outputs": {}, "guided_choice": None, "grammar": ""}, None),
]


@pytest.mark.parametrize(("body", "grammar"), ASKED)
def test_every_way_to_ask_reaches_the_engine(live, body, grammar):
    for path, what in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": USER})):
        assert live.post(path, **what, **body).status_code == 200
        assert live.engine.asked[-1].params.grammar == grammar


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"guided_regex": "a", "regex": "a"}, "regex", "guided_regex and regex both"),
        ({"structured_outputs": {"grammar": ""}}, "structured_outputs.grammar", "is empty"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "is empty"),
        ({"structured_outputs": {"json": ""}}, "structured_outputs.json", "is empty"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex", "is empty"),
        ({"guided_choice": []}, "guided_choice", "is empty; say what the output must match, or leave it out"),
        *(({name: ""}, name, "is empty") for name in ("guided_json", "guided_regex", "guided_grammar", "json_schema")),
        *(({name: ""}, name, "is empty") for name in ("regex", "ebnf", "structural_tag")),
        (
            {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
            "response_format",
            "structured_outputs.choice and response_format both",
        ),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice", "both"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format", "no schema"),
        ({"response_format": {}}, "response_format", "must be text"),
        ({"response_format": {"type": "structural_tag", "format": {}}}, "response_format", "not supported"),
        ({"guided_regex": "(("}, "guided_regex", "unclosed group"),
        ({"structured_outputs": {"grammar": 'start: "a" foo'}}, "structured_outputs.grammar", 'unknown name: "foo"'),
        ({"ebnf": 'root ::= "a" ('}, "ebnf", "line 1"),
        ({"guided_json": {"type": "integer", "minimum": 5, "maximum": 3}}, "guided_json", "Unsatisfiable"),
        ({"guided_json": {"uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_json": {"items": {"uniqueItems": True}}}, "guided_json", "items: uniqueItems is a rule that can't"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": "no", "schema": {}}}},
            "response_format",
            "strict must be true or false",
        ),
        (
            {"guided_json": {"properties": {f"p{i}": {} for i in range(600)}}},
            "guided_json",
            "600 properties are optional, at most 500 may be",
        ),
        ({"guided_json": "{"}, "guided_json", "must be JSON"),
        ({"guided_json": {"$ref": "http://127.0.0.1:9/a.json"}}, "guided_json", "does not fetch"),
        ({"regex": "a" * 9000}, "regex", "has 9000 bytes of regular expressions"),
        ({"regex": "[^\\s\\S]"}, "regex", "no text matches"),
        ({"json_schema": {"enum": ["a" * 40000]}}, "json_schema", "this server accepts 32768"),
        (
            {"json_schema": {"patternProperties": {"a*" * 2500: {"pattern": "b*" * 2500}}}},
            "json_schema",
            "has 10000 bytes of regular expressions",
        ),
        ({"json_schema": '{"items":' * 3000 + "{}" + "}" * 3000}, "json_schema", "must be JSON"),
    ],
)
def test_what_cannot_be_obeyed_is_told_by_field_and_place(live, body, param, said):
    response = live.post(COMPLETIONS, prompt="a", **body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and said in error["message"], error


class Collections(BaseModel):
    """Types for which pydantic writes `uniqueItems` and `format: binary`."""

    tags: set[str]
    data: bytes


@pytest.mark.parametrize("strict", [True, None, False])
def test_rules_that_cannot_be_enforced_are_dropped_only_where_the_client_says_so(live, strict):
    schema = {**Collections.model_json_schema(), "additionalProperties": False}
    inside = {"name": "x", "schema": schema} | ({} if strict is None else {"strict": strict})
    response = live.post(CHAT, messages=USER, response_format={"type": "json_schema", "json_schema": inside})
    if strict is not False:
        assert response.status_code == 400 and "properties.tags: uniqueItems" in response.json()["error"]["message"]
        return
    assert response.status_code == 200
    asked = json.loads(live.engine.asked[-1].params.grammar.text)
    assert asked["properties"]["tags"] == {"items": {"type": "string"}, "title": "Tags", "type": "array"}
    assert asked["properties"]["data"] == {"title": "Data", "type": "string"} and asked["required"] == ["tags", "data"]
    answer = live.post("/v1/responses", input="hi", text={"format": {"type": "json_schema", **inside}})
    assert answer.status_code == 200, answer.text


class Inner(BaseModel):
    on: bool
    kind: str = Field(pattern="^[a-c]{2}$")


class Answer(BaseModel):
    size: int = Field(ge=0, le=99)
    inner: Inner
    tags: list[bool] = Field(max_length=3)


@pytest.mark.wide
def test_openai_client_parses_answers_of_a_real_engine(subject, tmp_path):
    """Of a random model, at temperature 1, with and without an adapter, and several answers to a call."""
    shutil.copytree(subject("wide_heads").model, tmp_path / "model")
    backend = save_tokenizer(tmp_path / "model")
    tokenizer = Tokenizer(
        PreTrainedTokenizerFast(
            tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template=CHAT_TEMPLATE
        )
    )
    config = EngineConfig(model=tmp_path / "model", memory_bytes=8 << 20, threads=1, cpu_kernels="torch")
    engine = Engine.from_config(config)
    engine.store.register("r2-qv", subject("wide_heads").adapters["r2-qv"])
    with (
        live_server(cast(Any, engine), tokenizer, settings={"model": config.model}) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for name in ("model", "r2-qv"):
            answer = client.chat.completions.parse(
                model=name,
                messages=[{"role": "user", "content": "hi"}],
                response_format=Answer,
                temperature=1,
                seed=3,
                n=3,
                max_tokens=150,
            )
            for choice in answer.choices:
                assert choice.finish_reason == "stop"
                assert choice.message.parsed == Answer.model_validate_json(choice.message.content or "")
        stopped = client.completions.create(
            model="model", prompt="x", max_tokens=30, stop=["b"], extra_body={"guided_regex": "a{4}b+c"}
        )
        assert stopped.choices[0].text == "aaaa" and stopped.choices[0].finish_reason == "stop"
        with pytest.raises(openai.BadRequestError, match="leave none to sample") as refused:
            client.completions.create(model="model", prompt="x", extra_body={"regex": "a", "min_tokens": 3})
        assert refused.value.param == "grammar"


def test_compiling_holds_up_no_other_request(live):
    """A grammar at the limits takes a while in a thread; the event loop goes on."""
    import threading

    slow = {"type": "object", "properties": {f"p{index}": {"type": "string"} for index in range(500)}}
    answers = []
    thread = threading.Thread(target=lambda: answers.append(live.post(COMPLETIONS, prompt="a", json_schema=slow)))
    thread.start()
    answered = 0
    while thread.is_alive():
        answered += live.client.get("/health").status_code == 200
        time.sleep(0.001)
    thread.join()
    assert answered
    assert answers[0].status_code == 200, answers[0].text
    assert live.engine.asked[-1].params.grammar is not None
