"""The body of POST /v1/messages, Anthropic's, as a chat request."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from ..access.limits import RequestLimits
from ..errors import ApiError, clipped
from .chat_request import ChatCompletionRequest
from .translation import objects, part_text, read_fields, renaming, text_of, typed, unsupported, wrong

OWN = frozenset(
    (
        "max_tokens", "messages", "metadata", "output_config", "stop_sequences", "system", "thinking", "thread",
        "tool_choice", "tools",
    )
)  # fmt: skip

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "container": ((), "there are no containers that a model could use"),
    "context_management": ((), "shorten the messages, or use truncate_prompt_tokens"),
    "mcp_servers": (([],), "call their tools from the client"),
}

HARMLESS = frozenset(("betas", "cache_control", "diagnostics", "inference_geo", "service_tier", "speed"))
"""Fields on which no answer depends: prompts are cached by themselves, and there is one class of service."""

NO_THREAD = "thread_not_found"
"""Code of the error to a call that goes on with a thread: Anthropic's client then sends the whole conversation."""

NAMES = {"prompt": "messages", "reasoning_effort": "output_config", "response_format": "output_config",
         "thinking_token_budget": "thinking.budget_tokens", "stop": "stop_sequences"}  # fmt: skip
"""The client's names of fields that the chat request has by others."""

CHOICES = {"auto": "auto", "any": "required", "none": "none"}
"""Anthropic's words for tool_choice, and OpenAI's."""


@dataclass(frozen=True, slots=True)
class MessagesRequest:
    """A request to answer."""

    chat: ChatCompletionRequest

    @classmethod
    def parse(cls, body: bytes, limits: RequestLimits) -> MessagesRequest:
        return cls._read(read_fields(body, limits, OWN, REFUSED), limits)

    @classmethod
    def parse_to_count(cls, body: bytes, limits: RequestLimits) -> MessagesRequest:
        """The same of a request whose tokens are to be counted: it needs no max_tokens."""
        return cls._read({"max_tokens": 1, **read_fields(body, limits, OWN, REFUSED)}, limits)

    @classmethod
    def _read(cls, fields: dict[str, Any], limits: RequestLimits) -> MessagesRequest:
        for name in ("max_tokens", "messages"):
            if name not in fields:
                raise ApiError(400, f"{name}: it is missing", param=name)
        thread = typed(fields, "thread", dict, "an object")
        if thread not in (None, {"type": "create"}):
            message = "no conversation is held here between calls; send all of its messages"
            raise ApiError(404, message, param="thread", code=NO_THREAD)
        chat = {name: value for name, value in fields.items() if name not in OWN | HARMLESS}
        chat["max_tokens"] = typed(fields, "max_tokens", int, "a number")
        messages = _messages(fields.get("system"), fields["messages"])
        chat["messages"] = messages
        if messages and messages[-1]["role"] == "assistant":  # the answer goes on with what the client began
            chat["continue_final_message"] = True
        chat["stop"] = typed(fields, "stop_sequences", list, "a list of strings") or []
        _output(fields, chat)
        if tools := objects(fields.get("tools", []), "tools"):
            chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
        if choice := typed(fields, "tool_choice", dict, "an object"):
            chat["tool_choice"] = _tool_choice(choice)
            if choice.get("disable_parallel_tool_use"):
                chat["parallel_tool_calls"] = False
        with renaming(NAMES):
            return cls(ChatCompletionRequest.of(chat, limits))


def _output(fields: dict[str, Any], chat: dict[str, Any]) -> None:
    """Take over how much is to be thought, and the JSON schema of the answer."""
    config = typed(fields, "output_config", dict, "an object") or {}
    effort = config.get("effort")
    if (thinking := typed(fields, "thinking", dict, "an object")) is not None:
        kind = thinking.get("type")
        if kind not in ("enabled", "disabled", "adaptive"):
            raise wrong("thinking.type", "enabled, disabled or adaptive")
        if kind == "disabled":
            effort = "none"
        elif (budget := typed(thinking, "budget_tokens", int, "a number", "thinking.")) is not None:
            chat["thinking_token_budget"] = budget
    if effort is not None:
        chat["reasoning_effort"] = effort
    if (asked := typed(config, "format", dict, "an object", "output_config.")) is not None:
        if asked.get("type") != "json_schema" or not isinstance(asked.get("schema"), dict):
            raise wrong("output_config.format", "a json_schema with its schema")
        inside = {"name": "answer", "schema": asked["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": inside}


def _messages(system: Any, given: Any) -> list[dict[str, Any]]:
    text = text_of(system, "system", ("text",))
    messages: list[dict[str, Any]] = [{"role": "system", "content": text}] if text else []
    for index, message in enumerate(objects(given, "messages")):
        messages += _of_message(message, f"messages[{index}]")
    return messages


def _of_message(message: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The messages of one of Anthropic's: each result of a tool is one of its own, before what the user says."""
    role = message.get("role")
    if role not in ("user", "assistant", "system"):
        raise wrong(f"{where}.role", "user, assistant or system")
    if isinstance(content := message.get("content"), str):
        return [{"role": role, "content": content}]
    results: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    for index, block in enumerate(objects(content, f"{where}.content")):
        at = f"{where}.content[{index}]"
        kind = block.get("type")
        if kind == "tool_use":
            calls.append(_call(block, at))
        elif kind == "tool_result":
            output = text_of(block.get("content"), f"{at}.content", ("text",))
            results.append({"role": "tool", "content": output or "", "tool_call_id": _id(block, "tool_use_id", at)})
        elif kind == "thinking":
            thoughts.append(typed(block, "thinking", str, "a string", f"{at}.") or "")
        elif kind != "redacted_thinking":  # of which only its maker can make sense
            texts.append(part_text(block, at, ("text",)))
    rest: dict[str, Any] = {"role": role, "content": "\n".join(texts) if texts else None}
    if calls:
        rest["tool_calls"] = calls
    if thoughts:
        rest["reasoning_content"] = "\n".join(thoughts)
    return [*results, rest] if texts or calls or thoughts or not results else results


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
        raise unsupported(f"{where}.type", f"{where} is of type {kind}; only tools that the client runs are known")
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
