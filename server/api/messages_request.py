"""The body of POST /v1/messages, Anthropic's, converted to a chat request.

Tests: tests/server/api/test_messages.py
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import StrictInt, WithJsonSchema

from ..access.limits import RequestLimits
from ..errors import ApiError, clipped
from .chat_request import ChatCompletionRequest
from .fields import unsupported
from .translation import AsChat, chat_part, content_of, objects, text_of, typed, wrong

NO_THREAD = "thread_not_found"
"""Error code for a request that continues a thread: Anthropic's client then sends the whole conversation."""

NAMES = {
    "prompt": "messages",
    "reasoning_effort": "output_config",
    "response_format": "output_config",
    "thinking_token_budget": "thinking.budget_tokens",
    "stop": "stop_sequences",
}
"""The client's names for fields of the chat request."""

KEEPS_ALL = ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]})
"""Values of `context_management` that change nothing; the second is Claude Code's."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's values of tool_choice, and OpenAI's."""


class MessagesBody(AsChat):
    """A request to generate a message. Prompts are cached automatically, and there is one service class."""

    refused = {
        "container": ((), "this server has no containers for models"),
        "context_management": (KEEPS_ALL, "shorten the messages, or use truncate_prompt_tokens"),
        "mcp_servers": (([],), "call their tools from the client"),
    }
    harmless = frozenset(("betas", "cache_control", "diagnostics", "inference_geo", "service_tier", "speed"))

    max_tokens: StrictInt
    messages: list[dict[str, Any]]
    metadata: Any = None
    output_config: dict[str, Any] = {}
    stop_sequences: list[Any] = []
    system: Annotated[Any, WithJsonSchema({"type": ["string", "array"]})] = None
    thinking: dict[str, Any] | None = None
    thread: dict[str, Any] | None = None
    tool_choice: dict[str, Any] | None = None
    tools: list[dict[str, Any]] = []

    @classmethod
    def parse(cls, body: bytes, limits: RequestLimits) -> ChatCompletionRequest:
        """The equivalent chat request."""
        asked = cls.read(body, limits)
        if asked.thread not in (None, {"type": "create"}):
            message = "this server stores no conversations; send all messages"
            raise ApiError(404, message, param="thread", code=NO_THREAD)
        messages, choice = _messages(asked.system, asked.messages), asked.tool_choice or {}
        chat = asked.as_chat(
            limits,
            NAMES,
            max_tokens=asked.max_tokens,
            messages=messages,
            stop=asked.stop_sequences or None,
            # the model continues the text that the client began
            continue_final_message=True if messages and messages[-1]["role"] == "assistant" else None,
            tools=[_tool(tool, f"tools[{index}]") for index, tool in enumerate(asked.tools)] or None,
            tool_choice=_tool_choice(choice) if choice else None,
            parallel_tool_calls=False if choice.get("disable_parallel_tool_use") else None,
            **_output(asked),
        )
        chat.allow_less()  # every request of this API has a limit; `stop_reason` tells that the context ended first
        return chat


class MessagesToCount(MessagesBody):
    """A request whose tokens are to be counted: it needs no max_tokens."""

    max_tokens: StrictInt = 1


def _output(asked: MessagesBody) -> dict[str, Any]:
    """The chat fields for the amount of reasoning and for the JSON schema of the output."""
    chat: dict[str, Any] = {}
    effort, thinking = asked.output_config.get("effort"), asked.thinking
    if thinking is not None:
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise wrong("thinking.type", "enabled, disabled or adaptive")
        if kind == "disabled":
            effort = "none"
        else:
            chat["thinking_token_budget"] = typed(thinking, "budget_tokens", int, "a number", "thinking.")
    chat["reasoning_effort"] = effort
    if (format := typed(asked.output_config, "format", dict, "an object", "output_config.")) is not None:
        if format.get("type") != "json_schema" or not isinstance(format.get("schema"), dict):
            raise wrong("output_config.format", "a json_schema with its schema")
        inside = {"name": "answer", "schema": format["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": inside}
    return chat


def _messages(system: Any, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    text = text_of(system, "system", ("text",))
    messages: list[dict[str, Any]] = [{"role": "system", "content": text}] if text else []
    for index, message in enumerate(given):
        messages += _of_message(message, f"messages[{index}]")
    return messages


def _of_message(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Messages equivalent to one of Anthropic's: each tool result becomes its own message, before the user's text."""
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", "user, assistant or system")
    if isinstance(content := message.get("content"), str):
        return [{"role": role, "content": content}]
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for index, block in enumerate(objects(content, f"{where}.content")):
        at = f"{where}.content[{index}]"
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, at))
        elif kind == "tool_result":
            output = content_of(block.get("content"), f"{at}.content", ("text",))
            results.append({"role": "tool", "content": output or "", "tool_call_id": _id(block, "tool_use_id", at)})
        elif kind == "thinking":
            thoughts.append(typed(block, "thinking", str, "a string", f"{at}.") or "")
        elif kind != "redacted_thinking":  # only its maker can read it
            parts.append(chat_part(block, at, ("text",)))
    rest: dict[str, Any] = {"role": role, "content": parts or None}
    if calls:
        rest["tool_calls"] = calls
    if thoughts:
        rest["reasoning_content"] = "\n".join(thoughts)
    return [*results, rest] if parts or calls or thoughts or not results else results


def _call(block: dict[str, Any], where: str) -> dict[str, Any]:
    arguments = typed(block, "input", dict, "an object", f"{where}.") or {}
    function = {"name": _id(block, "name", where), "arguments": json.dumps(arguments, ensure_ascii=False)}
    return {"id": _id(block, "id", where), "type": "function", "function": function}


def _id(block: dict[str, Any], name: str, where: str) -> str:
    value = typed(block, name, str, "a string", f"{where}.")
    if not value:
        raise wrong(f"{where}.{name}", "a string")
    return value


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        kind = clipped(repr(tool["type"]))
        raise unsupported(f"{where}.type", f"{where} is of type {kind}; only tools that the client runs are supported")
    function = {"name": _id(tool, "name", where)}
    if (description := typed(tool, "description", str, "a string", f"{where}.")) is not None:
        function["description"] = description
    schema = typed(tool, "input_schema", dict, "an object", f"{where}.")
    return {"type": "function", "function": {**function, "parameters": schema or {"type": "object"}}}


def _tool_choice(choice: dict[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"type": "function", "function": {"name": _id(choice, "name", "tool_choice")}}
    if not isinstance(kind, str) or kind not in CHOICES:
        raise wrong("tool_choice.type", "auto, any, none or tool")
    return CHOICES[kind]
