"""The request shapes of coding agents, through 50 turns with tools and thoughts: Codex's responses, Claude Code's
messages. Each turn's prompt has everything said so far, once, and begins as the one before it.
"""

import json

import pytest

from .recorded import ANSWER, THOUGHT, num_tokens

pytestmark = pytest.mark.integration

TURNS = 50
SHELL = {
    "type": "object",
    "properties": {
        "command": {"type": "array", "items": {"type": "string"}, "description": "The command to execute"},
        "workdir": {"type": "string", "description": "The working directory to execute the command in"},
        "timeout_ms": {"type": "number", "description": "The timeout for the command in milliseconds"},
    },
    "required": ["command"],
    "additionalProperties": False,
}
PLAN = {
    "type": "object",
    "properties": {
        "explanation": {"type": "string"},
        "plan": {
            "type": "array",
            "description": "The list of steps",
            "items": {
                "type": "object",
                "properties": {"step": {"type": "string"}, "status": {"type": "string"}},
                "required": ["step", "status"],
                "additionalProperties": False,
            },
        },
    },
    "required": ["plan"],
    "additionalProperties": False,
}


def command_of(turn):
    return ["bash", "-lc", f"grep -n \"a'b\\\\{turn}\" 'x y.py'"]


def said(turn):
    """What the model says: a thought, a word, and a call in each turn but the last."""
    call = json.dumps({"name": "shell", "arguments": {"command": command_of(turn), "timeout_ms": 1000 + turn}})
    thought = f"<think>\n{THOUGHT} {turn}\n</think>\n\n"
    return f"{thought}Looking ({turn}).\n<tool_call>\n{call}\n</tool_call>" if turn < TURNS - 1 else thought + ANSWER


def result_of(turn):
    return f"exit 0: <tool_call> é {turn}"


def events_of(response):
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


class Prompts:
    """The prompts of a conversation, of which each begins as the one before it, without the begun answer."""

    def __init__(self, live):
        self._live, self._last = live, ""

    def check(self, turn):
        prompt = self._live.engine.prompt.removesuffix("<assistant>")
        assert prompt.startswith(self._last) and prompt.count(f"<tool>{result_of(turn - 1)}") == (turn > 0)
        assert prompt.count("<tool>") == prompt.count(f"<think>{THOUGHT}") == prompt.count("Looking (") == turn
        self._last = prompt


def codex_item(item):
    """An item as Codex keeps it: without ids and states, with what it knows of."""
    kept = {
        "reasoning": ("type", "summary", "content", "encrypted_content"),
        "message": ("type", "role", "content"),
        "function_call": ("type", "name", "arguments", "call_id"),
    }[item["type"]]
    item = {name: item.get(name) for name in kept}
    if item["type"] == "message":
        item["content"] = [{"type": part["type"], "text": part["text"]} for part in item["content"]]
    return item


def test_codex(told):
    """POST /v1/responses, streamed, of which nothing is stored."""
    told.engine.texts = [said(turn) for turn in range(TURNS)]
    context = "<environment_context>\n  <cwd>/x</cwd>\n</environment_context>"
    items = [
        {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Sandboxed."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": context}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Find it."}]},
    ]
    tools = [
        {"type": "function", "name": "shell", "description": "Runs.", "strict": False, "parameters": SHELL},
        {"type": "function", "name": "update_plan", "description": "Plans.", "strict": False, "parameters": PLAN},
    ]
    asked = {
        "model": "base",
        "instructions": "You are a coding agent.",
        "tools": tools,
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "reasoning": {"effort": "medium", "summary": "auto"},
        "store": False,
        "stream": True,
        "include": ["reasoning.encrypted_content"],
        "prompt_cache_key": "0191",
        "text": {"verbosity": "medium"},
    }
    prompts, done = Prompts(told), []
    for turn in range(TURNS):
        counted = told.post("/v1/responses/input_tokens", **{**asked, "input": items, "stream": False})
        events = events_of(told.post("/v1/responses", **asked, input=items))
        prompts.check(turn)
        response = events[-1]["response"]
        assert events[-1]["type"] == "response.completed" and response["status"] == "completed"
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == response["output"] and response["store"] is False
        assert response["usage"]["input_tokens"] == counted.json()["input_tokens"]
        assert response["usage"]["output_tokens"] == num_tokens(said(turn))
        items += [codex_item(item) for item in done]
        if turn < TURNS - 1:
            reasoning, message, call = done
            assert reasoning["content"][0]["text"] == f"{THOUGHT} {turn}"
            assert message["content"][0]["text"] == f"Looking ({turn})."
            arguments = json.loads(call["arguments"])
            assert (call["name"], arguments) == ("shell", {"command": command_of(turn), "timeout_ms": 1000 + turn})
            items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result_of(turn)})
    assert done[-1]["content"][0]["text"] == ANSWER


def claude_code_turn(blocks):
    """The assistant's message as Claude Code sends it back: each block with what its deltas told."""
    names = {"thinking": ("thinking", "signature"), "text": ("text",), "tool_use": ("id", "name", "input")}
    content = [{"type": each["type"], **{name: each[name] for name in names[each["type"]]}} for each in blocks]
    return {"role": "assistant", "content": content}


def blocks_of(events):
    """The blocks of a streamed message, put together as Anthropic's clients do."""
    blocks, pieces = [], ""
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
            pieces = ""
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            if delta["type"] == "input_json_delta":
                pieces += delta["partial_json"]
            else:
                name = {"text_delta": "text", "thinking_delta": "thinking", "signature_delta": "signature"}
                blocks[-1][name[delta["type"]]] += delta[name[delta["type"]]]
        elif event["type"] == "content_block_stop" and blocks[-1]["type"] == "tool_use":
            blocks[-1]["input"] = json.loads(pieces or "{}")
    return blocks


def test_claude_code(told):
    """POST /v1/messages, streamed, with thinking; tokens are counted before each turn."""
    told.engine.texts = [said(turn) for turn in range(TURNS)]
    cached = {"cache_control": {"type": "ephemeral"}}
    system = [
        {"type": "text", "text": "You are an agent for code.", **cached},
        {"type": "text", "text": "Be careful.", **cached},
    ]
    tools = [
        {
            "name": "shell",
            "description": "Runs.",
            "input_schema": {**SHELL, "$schema": "http://json-schema.org/draft-07/schema#"},
        },
        {"name": "update_plan", "description": "Plans.", "input_schema": PLAN},
    ]
    asked = {
        "model": "base",
        "max_tokens": 32000,
        "system": system,
        "tools": tools,
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "metadata": {"user_id": "user_x_account__session_y"},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "temperature": 1,
    }
    reminder = {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"}
    turns = [{"role": "user", "content": [reminder, {"type": "text", "text": "Find it.", **cached}]}]
    headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "interleaved-thinking-2025-05-14"}
    prompts, blocks, events = Prompts(told), [], []
    for turn in range(TURNS):
        counting = {name: asked[name] for name in ("model", "system", "tools", "thinking")}
        counted = told.client.post(
            "/v1/messages/count_tokens?beta=true", json={**counting, "messages": turns}, headers=headers
        )
        body = {**asked, "messages": turns, "stream": True}
        events = events_of(told.client.post("/v1/messages?beta=true", json=body, headers=headers))
        prompts.check(turn)
        usage = events[-2]["usage"]
        total = usage["input_tokens"] + usage["cache_read_input_tokens"] + usage["cache_creation_input_tokens"]
        assert total == counted.json()["input_tokens"] and usage["output_tokens"] == num_tokens(said(turn))
        blocks = blocks_of(events)
        turns.append(claude_code_turn(blocks))
        if turn < TURNS - 1:
            thinking, text, call = blocks
            assert (thinking["thinking"], text["text"]) == (f"{THOUGHT} {turn}", f"Looking ({turn}).")
            assert (call["name"], call["input"]) == ("shell", {"command": command_of(turn), "timeout_ms": 1000 + turn})
            assert events[-2]["delta"]["stop_reason"] == "tool_use"
            result = {"type": "tool_result", "tool_use_id": call["id"], "content": result_of(turn), "is_error": False}
            turns.append({"role": "user", "content": [{**result, **cached}]})
    assert blocks[-1]["text"] == ANSWER and events[-2]["delta"]["stop_reason"] == "end_turn"
