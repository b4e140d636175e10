"""The body of POST /v1/responses, OpenAI's, converted to a chat request. Nothing is stored between requests.

Tests: tests/server/api/test_responses.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal

from orjson import Fragment
from pydantic import BeforeValidator, StrictInt

from ..access.limits import RequestLimits
from ..errors import clipped
from .chat_request import ChatCompletionRequest
from .fields import unsupported
from .json_text import dumps
from .response_tools import CALLS, ResponseTools, called
from .translation import AsChat, content_of, objects, part_text, typed, wrong

_STATELESS = "this server stores nothing between requests; send the whole conversation in input"

LOGPROBS = "message.output_text.logprobs"
INCLUDED = (LOGPROBS, "reasoning.encrypted_content")
"""Values of `include`; reasoning is sent as text, without an encrypted copy."""

NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    "verbosity": "text",
}
"""The client's names for fields of the chat request."""

UNREAD = ("ghost_snapshot", "image_generation_call", "tool_search_call", "tool_search_output", "web_search_call")
"""Types of items that the model is not shown: of tools that it does not have, and of the client's own notes."""

OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
"""Types of items with what a tool returned."""

TEXTS = ("input_text", "output_text", "text", "refusal")


def _items(given: Any) -> Any:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


class ResponsesBody(AsChat):
    """A request as the client sends it."""

    refused = {
        "background": ((False,), "a request ends with its connection"),
        "context_management": (([],), "shorten the input, or use truncate_prompt_tokens"),
        "conversation": ((), _STATELESS),
        "max_tool_calls": (
            (),
            "it counts calls of tools that a server runs; parallel_tool_calls: false allows one call",
        ),
        "previous_response_id": ((), _STATELESS),
        "prompt": ((), "this server stores no prompts; send instructions and input, or a text to POST /v1/completions"),
        "store": ((False,), _STATELESS),
    }
    harmless = frozenset(("client_metadata",))

    input: Annotated[list[dict[str, Any]], BeforeValidator(_items, json_schema_input_type=str | list[dict[str, Any]])]
    include: list[Any] = []
    instructions: str | None = None
    max_output_tokens: StrictInt | None = None
    metadata: dict[str, Any] = {}
    parallel_tool_calls: Any = True
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] = {"format": {"type": "text"}}
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: StrictInt | None = None
    truncation: Literal["auto", "disabled"] = "disabled"


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request to generate a response."""

    chat: ChatCompletionRequest
    told: dict[str, Fragment]
    """The fields that the response repeats, as JSON."""
    tools: ResponseTools
    left_out: Sequence[str]
    """Fields without an effect."""

    @property
    def names(self) -> dict[str, str]:
        """The client's names for fields of the chat request, also for those of its tools."""
        return NAMES | self.tools.places

    @classmethod
    def parse(cls, body: bytes, limits: RequestLimits) -> ResponsesRequest:
        asked = ResponsesBody.read(body, limits)
        for one in asked.include:
            if one not in INCLUDED:
                message = f"include can't have {clipped(repr(one))}; it may have {', '.join(INCLUDED)}"
                raise unsupported("include", message)
        response_format, verbosity = _text(asked.text)
        tools = ResponseTools.of(asked.tools)
        told = [item for item in enumerate(asked.input) if item[1].get("type") not in UNREAD]
        left_out = dict.fromkeys(f"input.{each['type']}" for each in asked.input if each.get("type") in UNREAD)
        if left_out and not told and not asked.instructions:
            items = ", ".join(name.removeprefix("input.") for name in left_out)
            raise wrong("input", f"more than items that the model is not shown ({items}); add a message")
        chat = asked.as_chat(
            limits,
            NAMES | tools.places,
            messages=_messages(asked.instructions, told),
            max_completion_tokens=asked.max_output_tokens,
            logprobs=LOGPROBS in asked.include or bool(asked.top_logprobs),
            top_logprobs=asked.top_logprobs,
            response_format=response_format,
            verbosity=verbosity,
            reasoning_effort=(asked.reasoning or {}).get("effort"),
            parallel_tool_calls=asked.parallel_tool_calls,
            tools=tools.functions,
            tool_choice=_tool_choice(asked.tool_choice, tools) if "tool_choice" in asked.model_fields_set else None,
            truncate_prompt_tokens=-1 if asked.truncation == "auto" else None,
        )
        repeated = {name: _written(name, getattr(asked, name)) for name in TOLD}
        return cls(chat, repeated, tools, [*tools.left_out, *left_out])


TOLD = ResponsesBody.model_fields.keys() - AsChat.model_fields.keys() - {"input", "include"}
"""Fields that a response repeats."""


def _written(name: str, value: Any) -> Fragment:
    try:
        return Fragment(dumps(value))
    except TypeError:  # it was parsed from JSON
        raise wrong(name, "JSON without numbers beyond 64 bits") from None


def _messages(instructions: str | None, items: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """The conversation: instructions and a first system message become one message, as do consecutive items of the
    assistant. items: each with its place.
    """
    told = [_message(item, f"input[{index}]") for index, item in items]
    if instructions:
        told.insert(0, {"role": "system", "content": instructions})
    first = [each["content"] for each in takewhile(_is_system_text, told)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(first)}] if first else []
    for message in told[len(first) :]:
        _add_message(messages, message)
    return messages


def _is_system_text(message: dict[str, Any]) -> bool:
    return message["role"] == "system" and bool(message["content"]) and isinstance(message["content"], str)


def _add_message(messages: list[dict[str, Any]], message: dict[str, Any]) -> None:
    last: dict[str, Any] = messages[-1] if messages else {"role": ""}
    if message["role"] == last["role"] == "assistant" and not last["content"]:
        calls = last.get("tool_calls", [])
        calls.extend(message.get("tool_calls", ()))
        last.update(message)
        if calls:
            last["tool_calls"] = calls
    elif last["role"] == "assistant" and "tool_calls" in message:
        last.setdefault("tool_calls", []).extend(message["tool_calls"])
    else:
        messages.append(message)


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    """An item of the input as a message; None for items that only describe how an earlier response was made."""
    kind = item.get("type", "message")
    if kind == "message":
        return _spoken(item, where)
    if kind in CALLS.values():
        call = {"id": _call_id(item, where), "type": "function", "function": called(item, where)}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind in OUTPUTS:
        output = content_of(item.get("output"), f"{where}.output", TEXTS)
        return {"role": "tool", "content": output or "", "tool_call_id": _call_id(item, where)}
    if kind == "reasoning":
        parts = objects(item.get("content") or item.get("summary") or [], f"{where}.content")
        texts = [part_text(part, where, ("reasoning_text", "summary_text", "text")) for part in parts]
        return {"role": "assistant", "content": None, "reasoning_content": "\n".join(texts)}
    if kind == "item_reference":
        raise unsupported(f"{where}.type", f"{where} refers to an item of an earlier response; {_STATELESS}")
    raise unsupported(f"{where}.type", f"{where} is of type {clipped(repr(kind))}, which this server does not support")


def _spoken(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str):
        raise wrong(f"{where}.role", "a string")
    content = content_of(item.get("content"), f"{where}.content", TEXTS)
    return {"role": "system" if role == "developer" else role, "content": content}


def _call_id(item: dict[str, Any], where: str) -> str:
    call_id = typed(item, "call_id", str, "a string", f"{where}.")
    if not call_id and str(item.get("type")).startswith(CALLS["local_shell"]):
        call_id = typed(item, "id", str, "a string", f"{where}.")
    if not call_id:
        raise wrong(f"{where}.call_id", "the id of a call")
    return call_id


def _text(text: dict[str, Any]) -> tuple[dict[str, Any] | None, Any]:
    """The response_format that `text` defines, and its verbosity."""
    if extra := text.keys() - {"format", "verbosity"}:
        raise unsupported(f"text.{clipped(min(extra))}", "text may only have format and verbosity")
    asked = typed(text, "format", dict, "an object", "text.")
    if asked is not None and asked.get("type") == "json_schema":
        inside = {name: value for name, value in asked.items() if name != "type"}
        asked = {"type": "json_schema", "json_schema": inside}
    return asked, text.get("verbosity")


def _tool_choice(choice: Any, tools: ResponseTools) -> Any:
    """auto, none and required mean the same in chat; a tool's name is one level deeper there."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        allowed = [_chosen(each, tools) for each in objects(choice.get("tools"), "tool_choice.tools")]
        inside = {"mode": choice.get("mode"), "tools": [each for each in allowed if each is not None]}
        return {"type": "allowed_tools", "allowed_tools": inside}
    if (chosen := _chosen(choice, tools)) is not None:
        return chosen
    raise unsupported(
        "tool_choice", "tool_choice must be auto, none, required, a tool of the client by its name, or allowed_tools"
    )


def _chosen(tool: dict[str, Any], tools: ResponseTools) -> dict[str, Any] | None:
    """A tool by its type and name, as in chat; None: it is none that the client runs."""
    kind, name = tool.get("type"), tool.get("name", tool.get("type"))
    if not isinstance(kind, str) or kind not in CALLS or not isinstance(name, str):
        return None
    return {"type": "function", "function": {"name": tools.name_of(name, tool.get("namespace"))}}
