"""The body of POST /v1/responses, OpenAI's, as a chat request. Nothing is stored between calls."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from orjson import Fragment

from ..access.limits import RequestLimits
from ..errors import ApiError, clipped
from .chat_request import ChatCompletionRequest
from .json_text import dumps
from .translation import objects, part_text, read_fields, renaming, text_of, typed, unsupported, wrong

OWN = frozenset(
    (
        "include", "input", "instructions", "max_output_tokens", "max_tool_calls", "metadata", "reasoning", "text",
        "tool_choice", "tools", "top_logprobs",
    )
)  # fmt: skip

_STATELESS = "nothing is stored here between calls; send the whole conversation in input"

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "background": ((False,), "a call is answered while its connection is open"),
    "context_management": (([],), "shorten the input, or use truncate_prompt_tokens"),
    "conversation": ((), _STATELESS),
    "previous_response_id": ((), _STATELESS),
    "prompt": ((), "there are no stored prompts; send instructions and input"),
    "store": ((False,), _STATELESS),
    "truncation": (("disabled",), "use truncate_prompt_tokens to cut the beginning of a prompt that is too long"),
}

LOGPROBS = "message.output_text.logprobs"
INCLUDED = frozenset((LOGPROBS, "reasoning.encrypted_content"))
"""What may be included; reasoning comes as text, with nothing encrypted beside it."""

NAMES = {
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
    "prompt": "input",
    "reasoning_effort": "reasoning",
    "response_format": "text",
    "verbosity": "text",
}
"""The client's names of fields that the chat request has by others."""

TEXTS = ("input_text", "output_text", "text", "refusal")


@dataclass(frozen=True, slots=True)
class ResponsesRequest:
    """A request to answer. told: the fields that the answer repeats, as JSON."""

    chat: ChatCompletionRequest
    told: dict[str, Fragment]

    @classmethod
    def parse(cls, body: bytes, limits: RequestLimits) -> ResponsesRequest:
        fields = read_fields(body, limits, OWN, REFUSED)
        if "input" not in fields:
            raise ApiError(400, "input: it is missing", param="input")
        told = {
            "instructions": typed(fields, "instructions", str, "a string"),
            "max_output_tokens": typed(fields, "max_output_tokens", int, "a number"),
            "max_tool_calls": typed(fields, "max_tool_calls", int, "a number"),
            "metadata": typed(fields, "metadata", dict, "an object") or {},
            "parallel_tool_calls": fields.get("parallel_tool_calls", True),
            "reasoning": typed(fields, "reasoning", dict, "an object"),
            "text": typed(fields, "text", dict, "an object") or {"format": {"type": "text"}},
            "tool_choice": fields.get("tool_choice", "auto"),
            "tools": objects(fields.get("tools", []), "tools"),
            "top_logprobs": typed(fields, "top_logprobs", int, "a number"),
        }
        included = _included(fields)
        chat = {name: value for name, value in fields.items() if name not in OWN}
        chat["messages"] = _messages(told["instructions"], fields["input"])
        chat["max_completion_tokens"] = told["max_output_tokens"]
        chat["logprobs"] = LOGPROBS in included or bool(told["top_logprobs"])
        chat["top_logprobs"] = told["top_logprobs"] or 0
        chat["response_format"], verbosity = _text(told["text"])
        if verbosity is not None:
            chat["verbosity"] = verbosity
        if (effort := (told["reasoning"] or {}).get("effort")) is not None:
            chat["reasoning_effort"] = effort
        if told["tools"]:
            chat["tools"] = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(told["tools"])]
        if "tool_choice" in fields:
            chat["tool_choice"] = _tool_choice(told["tool_choice"])
        with renaming(NAMES):
            return cls(ChatCompletionRequest.of(chat, limits), {name: _written(name, told[name]) for name in told})


def _included(fields: dict[str, Any]) -> list[str]:
    included = typed(fields, "include", list, "a list of strings") or []
    for one in included:
        if not isinstance(one, str) or one not in INCLUDED:
            message = f"there is no {clipped(repr(one))} to include; {', '.join(sorted(INCLUDED))} may be"
            raise unsupported("include", message)
    return included


def _written(name: str, value: Any) -> Fragment:
    try:
        return Fragment(dumps(value))
    except TypeError:  # it came as JSON
        raise wrong(name, "JSON without numbers beyond 64 bits") from None


def _messages(instructions: str | None, given: Any) -> list[dict[str, Any]]:
    """The conversation: instructions and a first system message are one, as is what an assistant did in a row."""
    items = [{"role": "user", "content": given}] if isinstance(given, str) else objects(given, "input")
    told = [_message(item, f"input[{index}]") for index, item in enumerate(items)]
    if instructions:
        told.insert(0, {"role": "system", "content": instructions})
    first = [each["content"] for each in takewhile(lambda each: each["role"] == "system" and each["content"], told)]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "\n\n".join(first)}] if first else []
    for message in told[len(first) :]:
        _add_message(messages, message)
    return messages


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
    """An item of the input as a message; what only says how an earlier answer came about is left out."""
    kind = item.get("type", "message")
    if kind == "message":
        return _spoken(item, where)
    if kind == "function_call":
        names = {name: typed(item, name, str, "a string", f"{where}.") or "" for name in ("name", "arguments")}
        call = {"id": _call_id(item, where), "type": "function", "function": names}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        output = text_of(item.get("output"), f"{where}.output", TEXTS)
        return {"role": "tool", "content": output or "", "tool_call_id": _call_id(item, where)}
    if kind == "reasoning":
        parts = objects(item.get("content") or item.get("summary") or [], f"{where}.content")
        texts = [part_text(part, where, ("reasoning_text", "summary_text")) for part in parts]
        return {"role": "assistant", "content": None, "reasoning_content": "\n".join(texts)}
    if kind == "item_reference":
        raise unsupported(f"{where}.type", f"{where} refers to an item of an earlier call; {_STATELESS}")
    raise unsupported(f"{where}.type", f"{where} is of type {clipped(repr(kind))}, which this server has no use for")


def _spoken(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if not isinstance(role, str):
        raise wrong(f"{where}.role", "a string")
    content = text_of(item.get("content"), f"{where}.content", TEXTS)
    return {"role": "system" if role == "developer" else role, "content": content}


def _call_id(item: dict[str, Any], where: str) -> str:
    call_id = typed(item, "call_id", str, "a string", f"{where}.")
    if not call_id:
        raise wrong(f"{where}.call_id", "the id of a call")
    return call_id


def _text(text: dict[str, Any]) -> tuple[dict[str, Any] | None, Any]:
    """The response_format that `text` asks for, and its verbosity."""
    if extra := text.keys() - {"format", "verbosity"}:
        raise unsupported(f"text.{clipped(min(extra))}", "text may have format and verbosity")
    asked = typed(text, "format", dict, "an object", "text.")
    if asked is not None and asked.get("type") == "json_schema":
        inside = {name: value for name, value in asked.items() if name != "type"}
        asked = {"type": "json_schema", "json_schema": inside}
    return asked, text.get("verbosity")


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        kind = clipped(repr(tool.get("type")))
        raise unsupported(
            f"{where}.type", f"{where} is of type {kind}; only functions, which the client runs, are known"
        )
    if not isinstance(tool.get("name"), str):
        raise wrong(f"{where}.name", "a string")
    return {"type": "function", "function": {name: tool[name] for name in tool if name != "type"}}


def _tool_choice(choice: Any) -> Any:
    """auto, none and required are chat's words, too; a function is named one level deeper there."""
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "function" and isinstance(choice.get("name"), str):
        return {"type": "function", "function": {"name": choice["name"]}}
    if choice.get("type") == "allowed_tools":
        tools = [_tool(tool, f"tool_choice.tools[{i}]") for i, tool in enumerate(objects(choice.get("tools"), "tools"))]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    raise unsupported("tool_choice", "tool_choice may be auto, none, required, a function by its name or allowed_tools")
