"""Forced calls over HTTP in every format, by chat, responses and messages, with and without thinking: the arguments
match their schemas, and streams are what whole answers are.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import jsonschema
import pytest
from transformers import AutoTokenizer

from chorus.core.config import EngineConfig
from chorus.core.engine import Engine
from chorus.server.demo.builtin import BUILTIN_MODEL
from chorus.server.text.channel_formats import HARMONY, NAMED_CHANNELS
from chorus.server.text.tokenizer import Tokenizer
from chorus.server.text.tool_call_formats import FORMAT_NAMES

from ..conftest import live_server

pytestmark = pytest.mark.wide

THINKS = "{%- for m in messages -%}{{ m.content }}\n{%- endfor -%}{{ (tools or []) | length }}<think>{#- </think> -#}"
PLAIN = "{%- for m in messages -%}{{ m.content }}\n{%- endfor -%}{{ (tools or []) | length }}"
USER = [{"role": "user", "content": "ab"}]
SCHEMAS: dict[str, dict[str, Any]] = {
    "get": {
        "type": "object",
        "properties": {
            "unit": {"type": "string", "enum": ["C", 'it\'s "F"']},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "when": {"anyOf": [{"type": "boolean"}, {"type": "null"}, {"const": "now"}]},
        },
        "required": ["unit", "days"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
    "deep.name": {
        "type": "object",
        "properties": {"at": {"$ref": "#/$defs/place"}},
        "required": ["at"],
        "additionalProperties": False,
        "$defs": {
            "place": {
                "type": "object",
                "properties": {"x": {"enum": [1, 2.5, None, "a, b"]}, "y": {"type": "boolean"}},
                "required": ["x", "y"],
                "additionalProperties": False,
            }
        },
    },
}


def with_specials(path: Path, marks: Sequence[str]) -> Path:
    """The built-in model, with tokens for marks."""
    for file in Path(BUILTIN_MODEL).iterdir():
        shutil.copy(file, path)
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODEL)
    tokenizer.add_special_tokens({"additional_special_tokens": [*marks]})
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """With the marks of reasoning."""
    return with_specials(tmp_path_factory.mktemp("model"), ["<think>", "</think>"])


def ask_chat(live, stream, choice, parallel, strict, thinking, sampling):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]
    body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel, "messages": USER, "stream": stream}
    if isinstance(choice, dict):
        body["tool_choice"] = {"type": "function", "function": {"name": choice["name"]}}
    if thinking is not None:
        body["thinking_token_budget"] = thinking
    response = live.post("/v1/chat/completions", **body, temperature=1, **sampling, max_tokens=450)
    assert response.status_code == 200, response.text
    if not stream:
        choice = response.json()["choices"][0]
        message = choice["message"]
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message["tool_calls"] or ()]
        return message["content"] or "", message["reasoning_content"] or "", calls, choice["finish_reason"]
    content = reasoning = ""
    calls, finish = [], None
    for line in response.text.splitlines():
        if not line.startswith("data: {"):
            continue
        (one,) = json.loads(line[6:])["choices"]
        content += one["delta"].get("content") or ""
        reasoning += one["delta"].get("reasoning_content") or ""
        for call in one["delta"].get("tool_calls") or ():
            if call.get("id"):
                calls.append([call["function"]["name"], ""])
            calls[call["index"]][1] += call["function"].get("arguments") or ""
        finish = one["finish_reason"] or finish
    return content, reasoning, [tuple(call) for call in calls], finish


def ask_responses(live, stream, choice, parallel, strict, thinking, sampling):
    tools = [
        {"type": "function", "name": name, "parameters": schema, "strict": strict} for name, schema in SCHEMAS.items()
    ]
    body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": parallel, "input": USER, "stream": stream}
    if isinstance(choice, dict):
        body["tool_choice"] = {"type": "function", "name": choice["name"]}
    if thinking is not None:
        body["thinking_token_budget"] = thinking
    response = live.post("/v1/responses", **body, temperature=1, **sampling, max_output_tokens=450)
    assert response.status_code == 200, response.text
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        whole = events[-1]["response"]
        deltas = "".join(e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta")
        assert deltas == "".join(item["arguments"] for item in whole["output"] if item["type"] == "function_call")
    else:
        whole = response.json()
    by_kind = {kind: [i for i in whole["output"] if i["type"] == kind] for kind in ("message", "reasoning")}
    content = "".join(part["text"] for item in by_kind["message"] for part in item["content"])
    reasoning = "".join(part["text"] for item in by_kind["reasoning"] for part in item["content"])
    calls = [(i["name"], i["arguments"]) for i in whole["output"] if i["type"] == "function_call"]
    return content, reasoning, calls, "tool_calls" if whole["status"] == "completed" else "length"


def ask_messages(live, stream, choice, parallel, strict, thinking, sampling):
    del strict
    tools = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    asked = {"type": "tool", "name": choice["name"]} if isinstance(choice, dict) else {"type": "any"}
    body = {"tools": tools, "tool_choice": {**asked, "disable_parallel_tool_use": not parallel}}
    if thinking is not None:
        body["thinking"] = {"type": "enabled", "budget_tokens": thinking}
    response = live.post(
        "/v1/messages", messages=USER, **body, stream=stream, temperature=1, **sampling, max_tokens=450
    )
    assert response.status_code == 200, response.text
    if stream:
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        blocks, finish = [], None
        for event in events:
            if event["type"] == "content_block_start":
                blocks.append({**event["content_block"], "partial": ""})
            elif event["type"] == "content_block_delta":
                for name in ("text", "thinking"):
                    if name in event["delta"]:
                        blocks[-1][name] += event["delta"][name]
                blocks[-1]["partial"] += event["delta"].get("partial_json", "")
            elif event["type"] == "message_delta":
                finish = event["delta"]["stop_reason"]
        for block in blocks:
            if block["type"] == "tool_use" and finish == "tool_use":
                block["input"] = json.loads(block["partial"])
    else:
        blocks, finish = response.json()["content"], response.json()["stop_reason"]
    calls = [(block["name"], json.dumps(block["input"])) for block in blocks if block["type"] == "tool_use"]
    text = "".join(block.get("text", "") for block in blocks)
    return text, "".join(block.get("thinking", "") for block in blocks), calls, finish.replace("tool_use", "tool_calls")


APIS = {"chat": ask_chat, "responses": ask_responses, "messages": ask_messages}
CHOICES = ("required", {"name": "get"}, {"name": "deep.name"})
LIMITS = ((True, True, None), (False, None, 8), (False, None, 0))
"""parallel_tool_calls, strict, and most tokens of thinking."""
SAMPLING = {
    name: {"logit_bias": {str(ord(begins)): -100}} for name, begins in {"muse_glimmer": "s", "inkling": "<"}.items()
}
"""Their messages that begin so are thoughts, which have no limit, and this model seldom ends them."""


@pytest.mark.parametrize("template", [PLAIN, THINKS], ids=["plain", "thinks"])
@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_forced_calls_match_their_schemas(model, tmp_path, name, template):
    chat_template = tmp_path / "own.jinja"
    chat_template.write_text(template, encoding="utf-8")
    tokenizer = Tokenizer.load(model, chat_template=chat_template, tool_call_format=name)
    engine = Engine.from_config(EngineConfig(model=model, memory_bytes=16 << 20, threads=1))
    ended = seed = 0
    with live_server(cast(Any, engine), tokenizer, settings={"model": model}) as live:
        for seed, ((api, ask), choice) in enumerate(itertools.product(APIS.items(), CHOICES)):
            parallel, strict, thinking = LIMITS[(seed + seed // 3) % 3]  # each API has each of both
            thinking = thinking if template is THINKS else None
            how = (choice, parallel, strict, thinking, {"seed": seed, **SAMPLING.get(name, {})})
            content, reasoning, calls, finish = ask(live, False, *how)
            case = (api, *how, content, reasoning, calls, finish)
            assert ask(live, True, *how)[:3] == (content, reasoning, calls) or finish != "tool_calls", case
            assert not content, case
            if tokenizer.output_syntax.reasoning is not None and thinking is not None:
                assert len(reasoning) <= thinking, case
            if finish != "tool_calls":
                continue
            ended += 1
            assert calls and (parallel or len(calls) == 1), case
            for called, arguments in calls:
                assert isinstance(choice, str) or called == choice["name"], case
                jsonschema.Draft202012Validator(SCHEMAS[called]).validate(json.loads(arguments))
    assert ended > 2, "they end"


@pytest.mark.parametrize("name", NAMED_CHANNELS)
def test_budgets_of_thinking_in_messages(tmp_path, name):
    """Thoughts are messages there, which the budget ends; a call or an answer follows, streamed or whole."""
    form = NAMED_CHANNELS[name]
    model = with_specials(tmp_path, sorted({form.start, form.message, *form.ends}))
    (tmp_path / "own.jinja").write_text(PLAIN, encoding="utf-8")
    tokenizer = Tokenizer.load(model, chat_template=tmp_path / "own.jinja", tool_call_format=name)
    engine = Engine.from_config(EngineConfig(model=model, memory_bytes=16 << 20, threads=1))
    lengths, ended = set(), 0
    thinks = {"logit_bias": {str(ord("c")): -100}} if form is HARMONY else {}  # analysis before commentary
    with live_server(cast(Any, engine), tokenizer, settings={"model": model}) as live:
        for seed, ((api, ask), budget) in enumerate(itertools.product(APIS.items(), (0, 9))):
            how = (CHOICES[seed % 3], False, None, budget, {"seed": seed, **thinks})
            content, reasoning, calls, finish = ask(live, False, *how)
            case = (api, *how, content, reasoning, calls, finish)
            assert len(reasoning) <= budget and not content, case  # a token is at most a character of it
            assert ask(live, True, *how)[:3] == (content, reasoning, calls) or finish != "tool_calls", case
            lengths.add(len(reasoning))
            ended += finish == "tool_calls"
            if finish == "tool_calls":
                jsonschema.Draft202012Validator(SCHEMAS[calls[0][0]]).validate(json.loads(calls[0][1]))
        plain = live.post("/v1/chat/completions", messages=USER, thinking_token_budget=2, max_tokens=60, seed=3)
        assert "x-ignored-fields" not in plain.headers
        assert len(plain.json()["choices"][0]["message"]["reasoning_content"] or "") <= 2
    assert max(lengths) > 1 and ended > 1, "they think, and end"
