"""Tools of POST /v1/responses as functions, and their calls as items of OpenAI's types.

A function's call has the tool's own type in responses: a custom tool is a function of one text, a local shell one of a
command, and a namespace's tools have its name before theirs. Tools that OpenAI runs itself are left out.

Tests: tests/server/api/test_response_tools.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import from_json

from ..errors import clipped
from .fields import unsupported
from .tool_fields import check_tool
from .translation import objects, renaming, typed, wrong

LEFT_OUT = ("image_generation", "tool_search", "web_search", "web_search_preview")
"""Tools that OpenAI runs, or that only choose others: a model can answer without them."""

SHELL = "local_shell"
CALLS = {"function": "function_call", "custom": "custom_tool_call", SHELL: "local_shell_call"}
"""Types of items that call a tool, by the tool's type."""

_MOST_NAME = 64
_TEXT = "input"
"""The argument of a custom tool."""

_SHELL_FUNCTION = {
    "name": SHELL,
    "description": "Runs a command on the user's computer, and returns its output.",
    "parameters": {
        "type": "object",
        "properties": {
            "command": {"type": "array", "items": {"type": "string"}, "description": "The program and its arguments."},
            "working_directory": {"type": "string"},
            "timeout_ms": {"type": "integer"},
        },
        "required": ["command"],
    },
}


@dataclass(frozen=True, slots=True)
class ClientTool:
    """A tool as its client names it."""

    kind: str = "function"
    name: str = ""
    namespace: str | None = None

    @property
    def call(self) -> str:
        """The type of items that call it."""
        return CALLS[self.kind]

    @property
    def prefix(self) -> str:
        """What ids of such items begin with."""
        return {"custom": "ctc_", SHELL: "lsh_"}.get(self.kind, "fc_")

    def said(self, arguments: str) -> dict[str, Any]:
        """The fields of an item that calls it with these arguments of its function."""
        if self.kind == SHELL:
            return {"action": {"type": "exec", "env": {}, "command": [], **_object(arguments, partial=False)}}
        own = {"name": self.name} if self.namespace is None else {"name": self.name, "namespace": self.namespace}
        return {**own, **({"input": self.text(arguments)} if self.kind == "custom" else {"arguments": arguments})}

    @staticmethod
    def text(arguments: str) -> str:
        """The text of a custom tool's call, as far as it has come."""
        found = _object(arguments, partial=True).get(_TEXT)
        return found if isinstance(found, str) else ""


@dataclass(slots=True)
class ResponseTools:
    """The tools of a request."""

    functions: list[dict[str, Any]] = field(default_factory=list)
    """In the format of chat completions."""
    by_name: dict[str, ClientTool] = field(default_factory=dict)
    """By the names of the functions."""
    places: dict[str, str] = field(default_factory=dict)
    """Where the client has each of `functions`, for errors."""
    left_out: dict[str, None] = field(default_factory=dict)
    """The fields without an effect, in order."""

    @classmethod
    def of(cls, tools: Sequence[Mapping[str, Any]]) -> ResponseTools:
        """Raises an ApiError for a tool that can't be called."""
        made = cls()
        for index, tool in enumerate(tools):
            made._add(tool, f"tools[{index}]", None)
        return made

    def _add(self, tool: Mapping[str, Any], where: str, namespace: str | None) -> None:
        kind = tool.get("type")
        if kind == "namespace":
            if namespace is not None:
                raise unsupported(f"{where}.type", f"{where} is a namespace in another; give its tools to that one")
            name = _name(tool, where)
            for index, each in enumerate(objects(tool.get("tools"), f"{where}.tools")):
                self._add(each, f"{where}.tools[{index}]", name)
        elif kind in LEFT_OUT:
            self.left_out[f"tools.{kind}"] = None
        else:
            self._add_function(_function(tool, where), ClientTool(str(kind), tool.get("name", ""), namespace), where)

    def _add_function(self, function: Mapping[str, Any], tool: ClientTool, where: str) -> None:
        name = self.name_of(function["name"], tool.namespace)
        made, place = {"type": "function", "function": {**function, "name": name}}, f"tools[{len(self.functions)}]"
        self.places[place] = where
        with renaming(self.places):
            check_tool(made, place)
        self.functions.append(made)
        self.by_name[name] = tool

    @staticmethod
    def name_of(name: str, namespace: Any = None) -> str:
        """The name of a tool's function."""
        whole = f"{namespace.removesuffix('__')}__{name}" if isinstance(namespace, str) else name
        return name if len(whole) > _MOST_NAME else whole

    def tool(self, name: str) -> ClientTool:
        """The tool that a function stands for."""
        return self.by_name.get(name) or ClientTool(name=name)


def _function(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A tool as a function."""
    kind = tool.get("type")
    if kind == SHELL:
        return _SHELL_FUNCTION
    if kind == "custom":
        return _custom(tool, where)
    if kind != "function":
        raise unsupported(
            f"{where}.type",
            f"{where} is of type {clipped(repr(kind))}; only tools that the client runs are supported: function, "
            "custom, local_shell and namespace",
        )
    _name(tool, where)
    return {name: tool[name] for name in tool if name not in ("type", "defer_loading", "output_schema")}


def _custom(tool: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """A custom tool as a function of one text; what its text must look like is part of the description."""
    told = typed(tool, "description", str, "a string", f"{where}.") or ""
    format = typed(tool, "format", dict, "an object", f"{where}.") or {}
    if format.get("type", "text") == "grammar":
        syntax, rules = (typed(format, name, str, "a string", f"{where}.format.") for name in ("syntax", "definition"))
        told += f"\n\nThe text must match this {syntax or 'lark'} grammar:\n{rules or ''}"
    text = {"type": "string", "description": "The whole text that the tool is given."}
    parameters = {"type": "object", "properties": {_TEXT: text}, "required": [_TEXT]}
    return {"name": _name(tool, where), "description": told.strip(), "parameters": parameters}


def _name(tool: Mapping[str, Any], where: str) -> str:
    if not isinstance(name := tool.get("name"), str):
        raise wrong(f"{where}.name", "a string")
    return name


def _object(arguments: str, *, partial: bool) -> dict[str, Any]:
    """The arguments of a call. partial: also those that are cut off."""
    try:
        found = from_json(arguments, allow_partial="trailing-strings" if partial else "off")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def called(item: Mapping[str, Any], where: str) -> dict[str, str]:
    """The function, and its arguments as JSON, of an item that calls a tool."""
    if item["type"] == CALLS[SHELL]:
        action = typed(item, "action", dict, "an object", f"{where}.") or {}
        kept = _SHELL_FUNCTION["parameters"]["properties"]
        return {"name": SHELL, "arguments": json.dumps({name: action[name] for name in kept if action.get(name)})}
    field = "input" if item["type"] == CALLS["custom"] else "arguments"
    name, text = (typed(item, each, str, "a string", f"{where}.") or "" for each in ("name", field))
    arguments = json.dumps({_TEXT: text}, ensure_ascii=False) if field == "input" else text
    return {"name": ResponseTools.name_of(name, item.get("namespace")), "arguments": arguments}
