"""Tools and reasoning over HTTP: a fake engine with a test's text, and the built-in model."""

from __future__ import annotations

import json
import re
from typing import Any, cast

import openai
import pytest

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.demo.builtin import BUILTIN_MODEL
from chorus.server.text.tokenizer import Tokenizer

from ..tiny_tokenizer import save_tokenizer
from .conftest import Teller, live_server, telling_server

pytestmark = pytest.mark.wide

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{%- for message in messages -%}{{ message['content'] }}"
    "{%- for call in message['tool_calls'] or [] -%}{{ call['function']['arguments']['a'] + 1 }}{%- endfor -%}"
    "{{ '\n' }}{%- endfor -%}{{ (tools or []) | length }}{{ reasoning_effort }}</think>{#- <tool_call> -#}"
    "{%- if thinks -%}<think>\n{%- endif -%}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 7}},
    "required": ["unit", "days"],
}
CLOSED = {"additionalProperties": False}


def tool(name="f", parameters=PARAMETERS, **more):
    return {"type": "function", "function": {"name": name, "parameters": parameters, **more}}


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    with telling_server(tmp_path_factory.mktemp("model"), TEMPLATE) as live:
        yield live


@pytest.fixture
def say(live):
    """`say(text, **body)`: the answer to a call by OpenAI's client."""

    def ask(text, **body: Any):
        live.engine.text = text
        with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            made = client.chat.completions.create(**{"model": "base", "messages": USER, **body})
            return list(made) if body.get("stream") else made

    return ask


CALLS = (
    '<think>\nA.\n</think>\n\nWell\n<tool_call>\n{"name": "f", "arguments": {"days": 1}}\n</tool_call>\n'
    '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>'
)


def spelt(scores):
    """Text of the tokens that log-probabilities are of."""
    return bytes(byte for score in scores for byte in score.bytes).decode()


def test_a_whole_answer(say):
    for choice in say(CALLS, tools=[tool()], n=2, logprobs=True).choices:
        assert choice.finish_reason == "tool_calls" and spelt(choice.logprobs.content) == "Well"
        assert (choice.message.content, choice.message.reasoning_content) == ("Well", "A.")
        assert choice.message.reasoning == "A."
        assert [(call.function.name, call.function.arguments) for call in choice.message.tool_calls] == [
            ("f", '{"days": 1}'),
            ("f", "{}"),
        ]
        assert len({call.id for call in choice.message.tool_calls}) == 2
    message = say(CALLS, tools=[tool()], parallel_tool_calls=False).choices[0].message
    assert len(message.tool_calls) == 1
    plain = say(CALLS, tools=[tool()], tool_choice="none").choices[0]
    assert plain.message.content == CALLS.partition("</think>\n\n")[2] and plain.finish_reason == "stop"
    assert plain.message.tool_calls is None
    raw = say(CALLS, extra_body={"separate_reasoning": False}).choices[0].message
    assert raw.content == CALLS and raw.reasoning_content is None
    assert say(CALLS, extra_body={"include_reasoning": False}).choices[0].message.reasoning_content is None
    opened = say("A.</think>B", extra_body={"chat_template_kwargs": {"thinks": True}}).choices[0].message
    assert (opened.content, opened.reasoning_content) == ("B", "A.")


def test_a_stream(say):
    chunks = say(CALLS, tools=[tool()], stream=True, n=2, logprobs=True, stream_options={"include_usage": True})
    assert chunks.pop().usage.completion_tokens == 2 * (len(CALLS) + 1)
    for index in range(2):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == index]
        assert all(spelt(c.logprobs.content) == c.delta.content for c in mine if c.logprobs)
        assert sum(len(choice.logprobs.content) for choice in mine if choice.logprobs) == len("Well")
        assert "".join(choice.delta.content or "" for choice in mine) == "Well"
        for name in ("reasoning_content", "reasoning"):
            assert "".join(getattr(choice.delta, name, None) or "" for choice in mine) == "A."
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["tool_calls"]
        pieces = [call for choice in mine for call in choice.delta.tool_calls or ()]
        begun = [call for call in pieces if call.id]
        assert [(call.index, call.function.name, call.function.arguments) for call in begun] == [
            (0, "f", ""),
            (1, "f", ""),
        ]
        assert [call.index for call in pieces] == sorted(call.index for call in pieces) and len(pieces) > 6
        for number, arguments in enumerate(('{"days": 1}', "{}")):
            assert "".join(call.function.arguments for call in pieces if call.index == number) == arguments


MIXED = f"<think>\nA.\n</think>\n\nWéll \n{CALLS.partition('Well')[2]}\n Dône <tool_call>\n5</tool_call> "
MIXED_CONTENT = "Wéll", "Dône <tool_call>\n5</tool_call> "


def test_log_probabilities_are_of_the_content(say):
    """Or of all tokens, where their ids are asked for."""
    asked = {"tools": [tool()], "logprobs": True}
    (choice,) = say(MIXED, **asked).choices
    assert choice.message.content == "".join(MIXED_CONTENT) and len(choice.message.tool_calls) == 2
    assert spelt(choice.logprobs.content) == "".join(MIXED_CONTENT)
    chunks = [chunk.choices[0] for chunk in say(MIXED, **asked, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == "".join(MIXED_CONTENT)
    told = [(spelt(chunk.logprobs.content), chunk.delta.content) for chunk in chunks if chunk.logprobs]
    assert all(tokens.removesuffix("<eos>") == content for tokens, content in told)
    assert "".join(tokens for tokens, _ in told) == "".join(MIXED_CONTENT)
    only_calls = say(CALLS.partition("Well")[2], **asked).choices[0]
    assert only_calls.logprobs.content == [] and only_calls.message.content is None
    (choice,) = say(MIXED, **asked, extra_body={"return_token_ids": True}).choices
    assert len(choice.logprobs.content) == len(choice.token_ids) == len(MIXED.encode()) + 1
    chunks = say(MIXED, **asked, stream=True, extra_body={"return_token_ids": True})
    scores = [score for chunk in chunks if (one := chunk.choices[0]).logprobs for score in one.logprobs.content]
    assert spelt(scores) == MIXED + "<eos>"


CHANNELS = (
    "{%- for m in messages -%}<|start|>{{ m.role }}<|message|>{{ m.thinking }}|{{ m.content }}<|end|>{%- endfor -%}"
    "{{ tools and '' }}<|start|>assistant{#- <|channel|>analysis, <|channel|>commentary, <|channel|>final -#}"
)


def test_answers_in_channels(start, pretrained, monkeypatch):
    """gpt-oss's harmony, over each of the three APIs."""
    monkeypatch.setattr(pretrained, "chat_template", CHANNELS)
    engine = Teller([], max_model_len=4096)
    live = start(engine)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    engine.text = f"{thought}<|channel|>final<|message|>It rains."
    chat = live.post(CHAT, model="base", messages=USER).json()["choices"][0]["message"]
    assert (chat["content"], chat["reasoning_content"]) == ("It rains.", "Hm.")
    output = live.post("/v1/responses", model="base", input="hi").json()["output"]
    assert [item["type"] for item in output] == ["reasoning", "message"]
    blocks = live.post("/v1/messages", model="base", messages=USER, max_tokens=200).json()["content"]
    assert [block["type"] for block in blocks] == ["thinking", "text"]
    engine.text = (
        f'{thought}<|channel|>commentary to=functions.f <|constrain|>json<|message|>{{"unit": "C", "days": 2}}'
    )
    called = live.post(CHAT, model="base", messages=USER, tools=[tool()]).json()["choices"][0]
    (call,) = called["message"]["tool_calls"]
    assert called["finish_reason"] == "tool_calls" and call["function"]["name"] == "f"
    assert json.loads(call["function"]["arguments"]) == {"unit": "C", "days": 2}


def test_calls_in_an_unknown_format_are_told(start, pretrained, monkeypatch, caplog, tmp_path):
    monkeypatch.setattr(pretrained, "chat_template", "{{ messages[0].content }}{{ tools }}")
    live = start(Teller([], max_model_len=4096))
    told = live.post(CHAT, model="base", messages=USER, tools=[tool()])
    assert told.headers["X-Ignored-Fields"] == "tools"
    assert "X-Ignored-Fields" not in live.post(CHAT, model="base", messages=USER).headers
    save_tokenizer(tmp_path)
    template = tmp_path / "own.jinja"
    template.write_text("{{ tools }}", encoding="utf-8")
    Tokenizer.load(tmp_path, chat_template=template, tool_call_format="lfm2")
    assert "tools" not in caplog.text
    Tokenizer.load(tmp_path, chat_template=template)
    assert "name the format with --tool-call-format" in caplog.text
    with pytest.raises(ValueError, match=r"tool_call_format is 'lfm', but must be one of .*lfm2"):
        Tokenizer.load(tmp_path, tool_call_format="lfm")


def test_reasoning_is_shown_to_the_template_by_the_name_that_it_knows(start, pretrained, monkeypatch):
    monkeypatch.setattr(pretrained, "chat_template", CHANNELS)
    live = start(Teller([], max_model_len=4096))
    for name in ("reasoning_content", "reasoning", "thinking"):
        said = {"role": "assistant", "content": "Yes.", name: "So."}
        shown = live.post("/tokenize", model="base", messages=[*USER, said, *USER], return_token_strs=True).json()
        assert "So.|Yes." in "".join(shown["token_strs"]).replace("\u0120", " "), name


@pytest.mark.parametrize("shown", [True, False])
def test_tokens_of_reasoning_are_counted(say, shown):
    """From after its first mark to the end of its last, shown or not, of all answers together."""
    asked: dict[str, Any] = {"tools": [tool()], "n": 2, "extra_body": {"include_reasoning": shown}}
    expected = 2 * len("\nA.\n</think>")
    assert say(CALLS, **asked).usage.completion_tokens_details.reasoning_tokens == expected
    last = say(CALLS, **asked, stream=True, stream_options={"include_usage": True})[-1]
    assert last.usage.completion_tokens_details.reasoning_tokens == expected
    assert say("5").usage.completion_tokens_details.reasoning_tokens == 0


def test_several_conversations_in_one_call(live):
    """A choice for each, in their order, parsed like chat answers; an unsupported field is refused by name."""
    live.engine.text, before = CALLS, len(live.engine.asked)
    body: dict[str, Any] = {"model": "base", "messages": [USER, [{"role": "user", "content": "ho"}]]}
    answer = live.post(f"{CHAT}/batch", **body, n=2, tools=[tool()]).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["message"]["tool_calls"][0]["function"]["name"] for choice in answer["choices"]} == {"f"}
    prompts = [bytes(one.token_ids[: one.num_prompt_tokens]) for one in live.engine.asked[before:]]
    assert [prompt[:3] for prompt in prompts] == [b"hi\n", b"hi\n", b"ho\n", b"ho\n"]
    for wrong in ({"messages": USER}, {"messages": []}, {"stream": True}):
        refused = live.post(f"{CHAT}/batch", **{**body, **wrong})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, next(iter(wrong))), refused.text


def test_an_answer_that_ends_within_a_call(say):
    text = '<tool_call>{"name": "f", "arguments": {"days": 1}}</tool_call>'
    cut = say(text, tools=[tool()], max_tokens=text.index("1")).choices[0]
    assert cut.finish_reason == "length" and cut.message.tool_calls[0].function.arguments == '{"days": '
    cut = say(text, tools=[tool()], stop=["1}"]).choices[0]
    assert cut.finish_reason == "stop" and cut.message.tool_calls[0].function.arguments == '{"days": '
    cut = say(text, tools=[tool()], max_tokens=9).choices[0]
    assert (cut.finish_reason, cut.message.content, cut.message.tool_calls) == ("length", text[:9], None)


def test_history_and_effort_reach_the_template(live, say):
    calls = [{"id": "x", "type": "function", "function": {"name": "f", "arguments": '{"a": 4}'}}]
    history = [*USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "tool_call_id": "x", "content": "9"}]
    say("", messages=history, tools=[tool()], reasoning_effort="low")
    asked = live.engine.asked[-1]
    assert bytes(asked.token_ids[: asked.num_prompt_tokens]) == b"hi\n5\n9\n1low</think>"


@pytest.mark.parametrize("verbosity", ["low", "high"])
def test_verbosity_is_the_templates_or_named(live, verbosity):
    """No known template has it, but OpenAI's clients send it."""
    for path, body in (
        (CHAT, {"messages": USER, "verbosity": verbosity}),
        ("/v1/responses", {"input": "a", "text": {"verbosity": verbosity}}),
    ):
        answer = live.post(path, **body)
        assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "verbosity"
        if path != CHAT:
            assert answer.json()["text"]["verbosity"] == verbosity


def test_the_usual_verbosity_asks_for_nothing(live):
    for more in ({"verbosity": "medium"}, {"verbosity": None}):
        assert "x-ignored-fields" not in live.post(CHAT, messages=USER, **more).headers


def test_a_template_gets_the_verbosity(tmp_path):
    with telling_server(tmp_path, "{{ messages[-1].content }}[{{ verbosity }}]") as live:
        answer = live.post(CHAT, messages=USER, verbosity="low")
        assert answer.status_code == 200 and "x-ignored-fields" not in answer.headers
        asked = live.engine.asked[-1]
    assert bytes(asked.token_ids[: asked.num_prompt_tokens]) == b"hi[low]"


def test_the_header_tells_what_the_template_ignores(live, start, fake_engine):
    body = {"messages": USER, "reasoning_effort": "high", "tools": [tool()]}
    assert "x-ignored-fields" not in live.post(CHAT, **body).headers
    other = start(fake_engine)
    assert other.post(CHAT, **body).headers["x-ignored-fields"] == "reasoning_effort, tools"
    assert other.post(CHAT, **body, stream=True).headers["x-ignored-fields"] == "reasoning_effort, tools"
    completion = other.post("/v1/completions", prompt="a", reasoning_effort="low")
    assert completion.status_code == 200 and completion.headers["x-ignored-fields"] == "reasoning_effort"


DEEP: dict[str, Any] = {}
for _ in range(17):
    DEEP = {"properties": {"a": DEEP}}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"tools": [tool()] * 129}, "tools", "129 entries"),
        ({"tools": [tool(description="x" * 300_000)]}, "tools", "this server accepts 262144"),
        ({"tools": [tool(parameters=DEEP)]}, "tools[0].function.parameters", "32 deep"),
        ({"tools": [tool(), tool()]}, "tools[1].function.name", "two tools"),
        ({"tools": [tool("a b")]}, "tools[0].function.name", "letters"),
        ({"tools": [{"type": "function"}]}, "tools[0]", "must be a function"),
        ({"tools": [{"type": "custom", "function": {"name": "f"}}]}, "tools[0]", "must be a function"),
        ({"tools": [tool(parameters={"type": "array"})]}, "tools[0].function.parameters", "of an object"),
        ({"tools": [tool(parameters={"properties": []})]}, "tools[0].function.parameters.properties", "object"),
        ({"tools": [tool(strict="yes")]}, "tools[0].function.strict", "true or false"),
        ({"tools": [tool()], "tool_choice": "always"}, "tool_choice", "none, auto, required"),
        ({"tools": [tool()], "tool_choice": {"type": "function"}}, "tool_choice", "function"),
        ({"tools": [tool()], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "'g'"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tools": [tool(parameters={"properties": {"a": {"uniqueItems": True}}})], "tool_choice": "required"},
            "tools",
            "uniqueItems",
        ),
        (
            {"tools": [tool(parameters={"properties": {"a": {"pattern": "a" * 9000}}, **CLOSED}, strict=True)]},
            "tools",
            "9000",
        ),
        (
            {
                "tools": [tool()],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            },
            "tool_choice",
            "allowed_tools",
        ),
        (
            {
                "tools": [tool()],
                "tool_choice": {
                    "type": "allowed_tools",
                    "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]},
                },
            },
            "tool_choice",
            "'g'",
        ),
        (
            {
                "tools": [tool()],
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"uniqueItems": True}},
                },
            },
            "response_format",
            "uniqueItems",
        ),
        (
            {
                "messages": [
                    *USER,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]},
                ]
            },
            "messages[1]",
            "JSON object",
        ),
        ({"messages": [*USER, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages[1]", "with a name"),
    ],
)
def test_wrong_tools_are_named(live, body, param, said):
    response = live.post(CHAT, **{"messages": USER, **body})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param and said in error["message"], error


UNENFORCED = [
    ({"type": "array", "uniqueItems": True}, "properties.a: uniqueItems is a rule that can't be enforced"),
    ({"type": "object", "if": {}, "then": {}, **CLOSED}, "properties.a: if, then are rules that can't be enforced"),
    ({"type": "string", "format": "binary"}, "properties.a: Unknown format: binary"),
    ({"type": "foo"}, "properties.a: Invalid type: foo"),
    ({"type": "string", "pattern": "(?=a)b"}, "properties.a: regex parse error"),
    (
        {"type": "object", "properties": {f"p{i}": {} for i in range(600)}, **CLOSED},
        "properties.a: 600 properties are optional",
    ),
    ({"type": "string", "pattern": "[^\\s\\S]"}, ""),
]


@pytest.mark.parametrize(("schema", "said"), UNENFORCED)
@pytest.mark.parametrize("response_format", [{}, {"response_format": {"type": "json_object"}}])
def test_calls_that_cannot_be_forced_are_told_by_their_path_and_leak_no_rules(live, schema, said, response_format):
    parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
    tools = [tool("g"), tool("secret", parameters, strict=True)]
    for choice in ("required", "auto"):
        response = live.post(CHAT, messages=USER, tools=tools, tool_choice=choice, **response_format)
        error = response.json()["error"]
        assert response.status_code == 400 and error["param"] == "tools", error
        assert (f"tools[1].function.parameters.{said}" if said else "nsatisfiable schema") in error["message"]
        assert not any(mark in error["message"] for mark in ("call_1", "%json", "secret", "TEXT", "x-guidance", " | "))


def test_rules_that_cannot_be_enforced_are_dropped_for_functions_that_say_so(live):
    parameters = {
        "type": "object",
        "properties": {
            "tags": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "data": {"type": "string", "format": "binary"},
        },
        "dependentRequired": {"tags": ["data"]},
    }
    response = live.post(CHAT, messages=USER, tools=[tool("f", parameters, strict=False)], tool_choice="required")
    assert response.status_code == 200, response.text
    asked = live.engine.asked[-1].params.grammar
    assert '"tags"' in asked.text and '"items"' in asked.text and "uniqueItems" not in asked.text


ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [tool("g")]}}


def test_tools_may_be_allowed(live, say):
    """tool_choice may name some of the tools; the others are shown to the model and not called."""
    text = '<tool_call>{"name": "%s", "arguments": {}}</tool_call>'
    tools = [tool(), tool("g", None)]
    assert say(text % "g", tools=tools, tool_choice=ALLOWED).choices[0].message.tool_calls[0].function.name == "g"
    assert say(text % "f", tools=tools, tool_choice=ALLOWED).choices[0].message.tool_calls is None
    grammar = live.engine.asked[-1].params.grammar.text
    assert '"g\\", \\"arg' in grammar and '"f\\", \\"arg' not in grammar
    flat = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]}
    body = {"model": "base", "input": "hi", "tools": [FLAT, {**FLAT, "name": "g", "parameters": None}]}
    assert live.post("/v1/responses", **body, tool_choice=flat).status_code == 200
    assert live.engine.asked[-1].params.grammar.text == grammar


def test_a_function_that_is_named_is_called_once(live, say):
    named = {"type": "function", "function": {"name": "f"}}
    message = say(CALLS, tools=[tool()], tool_choice=named).choices[0].message
    assert len(message.tool_calls) == 1
    once = live.engine.asked[-1].params.grammar
    say(CALLS, tools=[tool()], tool_choice="required", parallel_tool_calls=False)
    assert live.engine.asked[-1].params.grammar == once


FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "integer"}}}


def test_content_matches_beside_calls(live, say):
    """A format of the content leaves room for calls, and none for content where calls are forced."""
    grammar = lambda: live.engine.asked[-1].params.grammar  # noqa: E731
    say("5", tools=[tool()], response_format=FORMAT)
    assert grammar().kind == "json_schema" and "calls)* | @content" in grammar().around
    say(CALLS, tools=[tool()], response_format=FORMAT, tool_choice="required")
    forced = grammar()
    say(CALLS, tools=[tool()], tool_choice="required")
    assert grammar() == forced and not forced.around
    say("5", tools=[tool()], response_format=FORMAT, tool_choice="none")
    assert "call" not in grammar().around


def test_reasoning_comes_before_content_that_matches(live, say):
    """Where the prompt ended within reasoning, an answer without its end would be no content at all."""
    message = say("A.</think>5", response_format=FORMAT, extra_body={"chat_template_kwargs": {"thinks": True}})
    assert message.choices[0].message.content == "5"
    assert "start: reasoned" in live.engine.asked[-1].params.grammar.around
    say("5", response_format=FORMAT, extra_body={"separate_reasoning": False})
    assert not live.engine.asked[-1].params.grammar.around


def test_the_built_in_model_calls_tools():
    """It has not learnt to, but is forced by the grammar: any function, several answers; one by name, streamed."""
    config = EngineConfig(model=BUILTIN_MODEL, memory_bytes=16 << 20, threads=1)
    engine = Engine.from_config(config)
    with (
        live_server(cast(Any, engine), Tokenizer.load(BUILTIN_MODEL), settings={"model": BUILTIN_MODEL}) as live,
        openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client,
    ):
        (model,) = client.models.list()
        asked: dict[str, Any] = {"model": model.id, "messages": USER, "temperature": 1, "seed": 1, "max_tokens": 100}
        tools = [tool(), tool("now", None)]
        made = client.chat.completions.create(
            **asked, tools=tools, tool_choice="required", n=2, parallel_tool_calls=False
        )
        for choice in made.choices:
            assert choice.finish_reason == "tool_calls" and choice.message.content is None
            (call,) = choice.message.tool_calls
            check(call.function.name, call.function.arguments)
        named = {"type": "function", "function": {"name": "f"}}
        with client.chat.completions.stream(
            **asked, tools=tools, tool_choice=named, parallel_tool_calls=False
        ) as stream:
            final = stream.get_final_completion().choices[0]
        assert final.message.tool_calls and final.message.tool_calls[0].function.name == "f"
        check("f", final.message.tool_calls[0].function.arguments)


def check(name, arguments):
    given = json.loads(arguments)
    assert given == {} if name == "now" else (given["unit"] in "CF" and 1 <= given["days"] <= 7), (name, given)


FLAT = {"type": "function", "name": "f", "parameters": PARAMETERS}


@pytest.mark.parametrize("stream", [False, True])
def test_a_responses_log_probabilities_are_of_its_messages(live, stream):
    live.engine.text = MIXED
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 2, "tools": [FLAT]}
        answer = client.responses.create(model="base", input="hi", stream=stream, **asked)
        response = list(answer)[-1].response if stream else answer
    first, second = (item for item in response.output if item.type == "message")
    assert (first.content[0].text, second.content[0].text) == MIXED_CONTENT
    assert spelt(first.content[0].logprobs) == MIXED_CONTENT[0]
    assert spelt(second.content[0].logprobs) == MIXED_CONTENT[1]


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_with_reasoning_and_calls(live, stream):
    live.engine.text = CALLS
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        answer = client.responses.create(model="base", input="hi", tools=[FLAT], stream=stream)
        events = list(answer) if stream else []
        response = events[-1].response if stream else answer
    reasoning, message, *calls = response.output
    assert (reasoning.content[0].text, message.content[0].text) == ("A.", "Well") and response.status == "completed"
    assert [(call.name, call.arguments) for call in calls] == [("f", '{"days": 1}'), ("f", "{}")]
    assert len({call.call_id for call in calls}) == 2
    assert 0 < response.usage.output_tokens_details.reasoning_tokens < len("<think>\nA.\n</think>\n\n")
    if stream:
        assert [event.sequence_number for event in events] == list(range(len(events)))
        pieces = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
        assert "".join(pieces) == '{"days": 1}{}'
        assert "".join(e.delta for e in events if e.type == "response.reasoning_text.delta") == "A."
        done = [e.item.type for e in events if e.type == "response.output_item.done"]
        assert done == ["reasoning", "message", "function_call", "function_call"]


SIGNATURE = "6E+i+v4JIzYkVayeU7+uwdcHoT86Scyn"


@pytest.mark.parametrize("stream", [False, True])
def test_an_anthropic_message_with_thinking_and_calls(live, stream):
    live.engine.text = CALLS
    body = {"tools": [{"name": "f", "input_schema": PARAMETERS}], "messages": USER, "max_tokens": 999, "stream": stream}
    response = live.post("/v1/messages", model="base", **body)
    if not stream:
        thinking, text, *calls = response.json()["content"]
        assert (thinking["thinking"], text["text"], response.json()["stop_reason"]) == ("A.", "Well", "tool_use")
        assert thinking["signature"] == SIGNATURE, "without one, clients send no thinking back"
        assert [(call["type"], call["name"], call["input"]) for call in calls] == [
            ("tool_use", "f", {"days": 1}),
            ("tool_use", "f", {}),
        ]
        return
    events = [json.loads(line.removeprefix("data: ")) for line in response.text.splitlines() if line.startswith("data")]
    begun = [event["content_block"] for event in events if event["type"] == "content_block_start"]
    assert [block["type"] for block in begun] == ["thinking", "text", "tool_use", "tool_use"]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert [delta["signature"] for delta in deltas if delta["type"] == "signature_delta"] == [SIGNATURE]
    pieces = [delta.get("partial_json", "") for delta in deltas]
    assert "".join(pieces) == '{"days": 1}{}'
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_what_tools_gave_is_sent_back(live):
    """A call that a response had and its result, as items and as blocks, are the same prompt."""
    live.engine.text = "ok"
    calls = [{"type": "function_call", "call_id": "1", "name": "f", "arguments": '{"a": 1}'}]
    items = [*USER, *calls, {"type": "function_call_output", "call_id": "1", "output": "4"}]
    live.post("/v1/responses", model="base", input=items)
    block = {"type": "tool_use", "id": "1", "name": "f", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "1", "content": "4"}
    turns = [{"role": "assistant", "content": [block]}, {"role": "user", "content": [result]}]
    live.post("/v1/messages", model="base", messages=[*USER, *turns], max_tokens=9)
    first, second = live.engine.asked[-2:]
    assert bytes(first.token_ids[: first.num_prompt_tokens]).startswith(b"hi\n2\n4\n")
    assert first.token_ids[: first.num_prompt_tokens] == second.token_ids[: second.num_prompt_tokens]


@pytest.mark.parametrize("arguments", ["{", "5", "[]", 7])
def test_calls_sent_back_must_be_calls(live, arguments):
    items = [*USER, {"type": "function_call", "call_id": "1", "name": "f", "arguments": arguments}]
    response = live.post("/v1/responses", model="base", input=items)
    assert response.status_code == 400 and response.json()["error"]["param"].startswith("input")


def test_a_budget_of_thinking_that_has_no_token_to_end_by_is_named_in_the_header(live, say):
    answer = live.post(CHAT, messages=USER, thinking_token_budget=5)
    assert answer.status_code == 200 and answer.headers["x-ignored-fields"] == "thinking_token_budget"
    assert "x-ignored-fields" not in live.post(CHAT, messages=USER, thinking_token_budget=-1).headers
    thinking = {"type": "enabled", "budget_tokens": 1024}
    message = live.post("/v1/messages", messages=USER, max_tokens=2048, thinking=thinking)
    assert message.status_code == 200 and message.headers["x-ignored-fields"] == "thinking_token_budget"
    error = live.post("/v1/messages", messages=USER, max_tokens=9, thinking={**thinking, "budget_tokens": -5})
    assert error.status_code == 400 and "thinking.budget_tokens" in error.json()["error"]["message"]


def test_every_delta_has_the_field_of_reasoning(say):
    """Clients of DeepSeek's and SGLang's read it of each, not only where there is some."""
    deltas = [chunk.choices[0].delta for chunk in say(CALLS, tools=[tool()], stream=True)]
    assert "".join(delta.reasoning_content or "" for delta in deltas) == "A."
    assert any(delta.tool_calls for delta in deltas) and deltas[-1].reasoning_content is None


IN_REASONING = '<think>So <tool_call>{"name": "f", "arguments": {"days": 1}}</tool_call>'
KINDS = {
    "5": {"text"},
    CALLS: {"text", "reasoning", "call"},
    IN_REASONING: {"reasoning", "call", "call_in_reasoning"},
    IN_REASONING.removesuffix("</tool_call>")[:-1]: {"reasoning", "call", "call_in_reasoning", "open_call"},
    '<tool_call>{"name": "f", "arguments": {"days": ': {"call", "open_call"},
    "<think>A": {"reasoning", "open_reasoning"},
    '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>': {"text", "unparsed"},
    "<tool_call>f(days=1)</tool_call>": {"text", "unparsed"},
}


@pytest.mark.parametrize("text", KINDS)
@pytest.mark.parametrize("stream", [False, True])
def test_parsed_outputs_are_counted_by_what_they_have(live, say, text, stream):
    def counted():
        found = re.findall(r'chorus_parsed_outputs_total\{kind="(\w+)"\} (\S+)', live.client.get("/metrics").text)
        return {kind: float(count) for kind, count in found}

    before = counted()
    say(text, tools=[tool()], n=2, stream=stream)
    assert {kind for kind, count in counted().items() if count > before[kind]} == KINDS[text]
    assert all(count - before[kind] in (0, 2) for kind, count in counted().items())


@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"type": "object", "properties": {}}, ""),
        ({"type": "object", "properties": {}, "additionalProperties": True}, ""),
        (
            {**PARAMETERS, **CLOSED, "properties": {"a": {"type": ["object", "null"], "properties": {}}}},
            ".properties.a",
        ),
        ({**PARAMETERS, **CLOSED, "$defs": {"b": {"type": "object"}}}, ".$defs.b"),
    ],
)
def test_strict_schemas_are_closed_as_openai_has_them(live, parameters, place):
    """OpenAI: 'additionalProperties' is required to be supplied and to be false."""
    response = live.post(CHAT, messages=USER, tools=[tool("f", parameters, strict=True)])
    error, where = response.json()["error"], "tools[0].function.parameters"
    assert response.status_code == 400 and error["param"] == where, error
    assert error["message"].startswith(f"with strict, {where}{place} must have additionalProperties, which must be fal")
    form = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": parameters}}
    error = live.post(CHAT, messages=USER, response_format=form).json()["error"]
    assert error["param"] == "response_format"
    assert error["message"].startswith(f"with strict, response_format.json_schema.schema{place} must have")
    for given in ({**PARAMETERS, **CLOSED}, None):
        tools = [{"type": "function", "function": {"name": "f", "strict": True, "parameters": given}}]
        assert live.post(CHAT, messages=USER, tools=tools).status_code == 200


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_tools_may_say_that_null_is_required(live, choice):
    inner = {"type": "object", "properties": {"b": {"type": "string"}}, "required": None}
    parameters = {"type": "object", "properties": {"a": inner}, "required": None}
    response = live.post(CHAT, messages=USER, tools=[tool("f", parameters)], tool_choice=choice)
    assert response.status_code == 200, response.text
