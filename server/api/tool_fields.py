"""Fields of a conversation about tools and reasoning.

Tests: tests/server/test_tool_calls.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BaseModel, Field, field_validator

from ...core.requests.grammar import Grammar, GrammarKind
from ...core.requests.json_schemas import check_optional, located, relaxed, without_nulls
from ..errors import ApiError, clipped
from ..text.argument_syntax import ArgumentSyntax
from ..text.channel_parser import ChannelParser
from ..text.output_parser import OutputParser
from ..text.output_parts import PartReader
from ..text.output_syntax import OutputSyntax
from .grammar_fields import check_size, check_strict
from .output_grammar import output_grammar

if TYPE_CHECKING:
    from ..access.limits import RequestLimits
    from ..text.tokenizer import Tokenizer

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

MAX_DEPTH = 32
"""Most levels of nesting in a tool's definition."""

WIDER = {"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"}
"""Keywords of a schema that may allow properties other than those in `properties`."""


MAX_BUDGET = 2**31 - 1

NAMED = "named"
"""The mode in which one function is called, once."""


class ToolChoice(NamedTuple):
    """The parsed tool_choice."""

    mode: str
    """`none`, `auto`, `required` or `named`."""
    names: list[str] | None
    """Functions that may be called; None: all."""


class ToolFields(BaseModel):
    """Fields about tools and reasoning."""

    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    include_reasoning: bool = True
    separate_reasoning: bool = True
    thinking_token_budget: Annotated[int, Field(ge=-1, le=MAX_BUDGET)] | None = None

    @field_validator("tools")
    @classmethod
    def _no_null_rules(cls, tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [
            {**tool, "function": {**function, "parameters": without_nulls(function["parameters"])}}
            if isinstance(function := tool.get("function"), dict) and "parameters" in function
            else tool
            for tool in tools
        ]

    @property
    def num_earlier_calls(self) -> int:
        """Number of calls in the conversation so far."""
        return 0

    def check_tools(self, limits: RequestLimits) -> None:
        """Raises an ApiError that names the wrong field; tools that can't be called are not checked."""
        chosen = self._chosen
        if isinstance(self.tool_choice, str) and self.tool_choice not in ("none", "auto", "required"):
            raise ApiError(400, "tool_choice must be none, auto, required, or name a function", param="tool_choice")
        if not self.tools and (isinstance(self.tool_choice, dict) or chosen.mode == "required"):
            raise ApiError(400, "tool_choice needs tools; give some", param="tool_choice")
        if not self._may_call:
            return
        for index, tool in enumerate(self.tools):
            check_tool(tool, f"tools[{index}]")
        size = len(json.dumps(self.tools, ensure_ascii=False).encode("utf-8", "surrogatepass"))
        if size > limits.max_tool_bytes:
            message = f"tools have {size} bytes, this server accepts {limits.max_tool_bytes}"
            raise ApiError(400, message, param="tools")
        if len(chosen.names or ()) > limits.max_tools:
            message = f"tool_choice names {len(chosen.names or ())} functions, this server accepts {limits.max_tools}"
            raise ApiError(400, message, param="tool_choice")
        _check_names([tool["function"]["name"] for tool in self.tools], chosen.names or ())

    @property
    def _may_call(self) -> bool:
        return bool(self.tools) and self._chosen.mode != "none"

    @property
    def _chosen(self) -> ToolChoice:
        choice = self.tool_choice
        if not isinstance(choice, dict):
            return ToolChoice("auto" if choice is None else choice, None)
        kind, inside = choice.get("type", "function"), choice.get("allowed_tools")
        if kind == "function":
            return ToolChoice(NAMED, _names([choice]))
        if kind == "allowed_tools" and isinstance(inside, dict) and inside.get("mode") in ("auto", "required"):
            return ToolChoice(inside["mode"], _names(inside.get("tools")))
        raise _wrong_choice()

    @property
    def _parallel(self) -> bool:
        """True if several calls are allowed; a named function is called once."""
        return self.parallel_tool_calls and self._chosen.mode != NAMED

    def _schemas(self) -> dict[str, dict[str, Any]]:
        """The schema of the arguments of each function that may be called."""
        names = self._chosen.names
        functions = [tool["function"] for tool in self.tools]
        return {f["name"]: _arguments(f) for f in functions if names is None or f["name"] in names}

    def _check_enforceable(self, enforced: Mapping[str, dict[str, Any]], written: ArgumentSyntax | None) -> None:
        """Raises an ApiError for arguments with more optional properties than can be enforced, or that can't be
        written in the format.
        """
        for index, tool in enumerate(self.tools):
            schema, where = enforced.get(tool["function"]["name"]), f"tools[{index}].function.parameters"
            try:
                check_optional(schema, where)
            except ValueError as error:
                raise ApiError(400, str(error), param="tools") from None
            if written is not None and schema is not None and (reason := written.unwritable(schema)) is not None:
                raise ApiError(400, f"{where}.{reason}", param="tools")

    def explained(self, message: str) -> str:
        """llguidance's message about the functions' schemas, with the path of the part that it is about."""
        for index, tool in enumerate(self.tools):
            found = located(message, tool["function"].get("parameters"), f"tools[{index}].function.parameters")
            if found is not None:
                return found
        return message

    def _enforced_schemas(self, *, forced: bool, as_json: bool) -> dict[str, dict[str, Any]]:
        """The same schemas; for a function that need not be called and does not say `strict` any JSON object, or where
        arguments are not JSON, those of its rules that can be enforced.
        """
        schemas = self._schemas()
        loose = set() if forced else schemas.keys() & self._loose
        return schemas | {name: {"type": "object"} if as_json else relaxed(schemas[name]) for name in loose}

    @property
    def _loose(self) -> set[str]:
        """Names of the functions whose arguments may be any object."""
        callable_tools = self.tools if self._may_call else []  # others may be anything
        return {tool["function"]["name"] for tool in callable_tools if not tool["function"].get("strict")}

    def syntax(self, tokenizer: Tokenizer) -> OutputSyntax:
        """The kinds of parts to parse the output for."""
        known = tokenizer.output_syntax
        calls = known.calls if self._may_call else None
        return replace(known, calls=calls, reasoning=known.reasoning if self.separate_reasoning else None)

    def obeyed_budget(self, tokenizer: Tokenizer) -> int | None:
        """Most tokens of reasoning; None: unlimited, as where reasoning ends without a special token."""
        close = self.syntax(tokenizer).closes_reasoning
        if close is None or close not in tokenizer.specials_in(close):
            return None
        return None if self.thinking_token_budget == -1 else self.thinking_token_budget

    def reader(self, syntax: OutputSyntax) -> PartReader:
        tools = self._schemas() if syntax.calls is not None else None
        how: dict[str, Any] = {
            "shows_reasoning": self.include_reasoning,
            "parallel": self._parallel,
            "first_call": self.num_earlier_calls,
        }
        if syntax.channels is not None:
            return ChannelParser(syntax.channels, tools, **how)
        return OutputParser(syntax, tools, **how)

    def output_grammars(
        self, content: tuple[str, Grammar] | None, syntax: OutputSyntax, tokenizer: Tokenizer, limits: RequestLimits
    ) -> list[tuple[str, Grammar]]:
        """Return grammars that can be enforced, each with its field; the output matches the last one.

        content: the grammar of the content, and the field that defines it. Reasoning may precede the content, or calls
        replace it. Calls that tool_choice forces leave no content. Functions that say `strict` are called as their
        schema says, or not at all.
        """
        forced = self._may_call and self._chosen.mode in ("required", NAMED)
        budget = self.obeyed_budget(tokenizer)
        schemas = (
            {}
            if syntax.calls is None
            else self._enforced_schemas(forced=forced, as_json=syntax.calls.style.arguments.is_json)
        )
        if forced:
            content = None
        elif content is None and budget is None and schemas.keys() <= self._loose:
            return []
        elif syntax == OutputSyntax():
            return [] if content is None else [content]
        text = json.dumps(list(schemas.values()), ensure_ascii=False)
        check_size("tools", Grammar(GrammarKind.JSON_SCHEMA, text), limits)
        self._check_enforceable(schemas, None if syntax.calls is None else syntax.calls.style.arguments)
        lark = output_grammar(
            syntax.bounded(budget),
            schemas,
            tokenizer.specials_in(syntax.marks),
            forced=forced,
            parallel=self._parallel,
            content=content is not None,
        )
        if content is None:
            return [("tools" if schemas else "thinking_token_budget", Grammar(GrammarKind.CALLS, lark))]
        field, grammar = content
        return [content, ("tools" if schemas else field, replace(grammar, around=lark))]


def _check_names(names: Sequence[str], chosen: Sequence[str]) -> None:
    """Check the tools. names: of all tools. chosen: of the tools that tool_choice names."""
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ApiError(400, f"two tools have the name {name}", param=f"tools[{index}].function.name")
    for name in chosen:
        if name not in names:
            raise ApiError(
                400, f"tool_choice names {clipped(repr(name))}, which is not among the tools", param="tool_choice"
            )


def _names(functions: Any) -> list[str]:
    """The names in a list of functions, each in the format of tool_choice."""
    names = []
    for each in functions if isinstance(functions, list) else ():
        function = each.get("function") if isinstance(each, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str):
            raise _wrong_choice()
        names.append(name)
    if not names:
        raise _wrong_choice()
    return names


def _wrong_choice() -> ApiError:
    message = (
        'tool_choice must be none, auto, required, {"type": "function", "function": {"name"}}, or {"type": '
        '"allowed_tools", "allowed_tools": {"mode", "tools"}} with such functions'
    )
    return ApiError(400, message, param="tool_choice")


def check_tool(tool: dict[str, Any], where: str) -> None:
    """Raises an ApiError for a tool that is no function, or whose schema is none of arguments."""
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise ApiError(400, f"{where} must be a function: type and function", param=where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        message = f"{where}.function.name must have 1 to 64 letters, digits, dots, dashes or underscores"
        raise ApiError(400, message, param=f"{where}.function.name")
    if not isinstance(function.get("strict"), bool | None):
        raise ApiError(400, f"{where}.function.strict must be true or false", param=f"{where}.function.strict")
    where = f"{where}.function.parameters"
    if not isinstance(parameters, dict | None) or (parameters or {}).get("type", "object") != "object":
        raise ApiError(400, f"{where} must be the JSON schema of an object", param=where)
    if not isinstance((parameters or {}).get("properties"), dict | None):
        raise ApiError(400, f"{where}.properties must be an object", param=f"{where}.properties")
    if _depth(function) > MAX_DEPTH:
        raise ApiError(400, f"{where} is nested more than {MAX_DEPTH} deep", param=where)
    if function.get("strict"):
        check_strict(
            {"type": "object", "properties": {}, **(parameters or {"additionalProperties": False})}, where, where
        )


def _depth(value: Any) -> int:
    """The depth of a value's nesting, or a little more than the limit."""
    level, depth = [value], 0
    while level and depth <= MAX_DEPTH:
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        level, depth = [each for each in inner if isinstance(each, dict | list)], depth + 1
    return depth


def _arguments(function: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a function's arguments: only the properties that it names, unless it allows others; with `strict:
    false`, without the rules that can't be enforced.
    """
    schema = {"type": "object", **(function.get("parameters") or {"properties": {}})}
    if function.get("strict") is False:
        schema = relaxed(schema)
    return schema if schema.keys() & WIDER or "properties" not in schema else {**schema, "additionalProperties": False}
