"""How model families write tool calls and reasoning, as data for `OutputParser` and for grammars.

Tests: tests/server/text/test_output_parser.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

_NAMED = r'\{\s*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)'


@dataclass(frozen=True, slots=True)
class ArgumentTags:
    """Arguments as `<parameter=NAME>VALUE</parameter>`, which the grammar writes and the parser reads.

    A text is written as it is, between line breaks; it ends at the first `close`, so no text has one. Other values are
    JSON, whose strings may have a `close`.
    """

    open: str = "<parameter="
    named: str = ">"
    """Ends the name."""
    close: str = "</parameter>"
    around: str = "\n"
    """Belongs to the format at either end of a value, and follows `close`."""

    @staticmethod
    def is_text(schema: Any) -> bool:
        """True if a value of this schema is written as it is, not as JSON."""
        return isinstance(schema, Mapping) and schema.get("type") == "string"

    def can_name(self, name: str) -> bool:
        """True if a property's name is read back as it is."""
        return self.named not in name and name == name.strip()

    def can_write(self, text: str) -> bool:
        """True if a text is read back as it is."""
        return self.close not in text


@dataclass(frozen=True, slots=True)
class ToolCallFormat:
    """A format of calls: `open`, then calls with `separator` between them, then `close`."""

    name: str
    signs: tuple[str, ...]
    """Texts that a chat template of the family contains, all of them."""
    open: str
    head: re.Pattern[str]
    """Pattern of the text between `open` and a call's arguments."""
    begin: str
    end: str = ""
    """What a grammar writes around a call's arguments, `{name}` for the function's name."""
    separator: str = ""
    close: str = ""
    first: str = ""
    """Text before the first call."""
    between: str = ""
    wrapped: bool = False
    """A call is a JSON object with the name and the arguments."""
    tags: ArgumentTags | None = None
    """How arguments are written; None: as JSON."""
    bare: bool = False
    """A JSON object at the beginning of an output is a call even without `open`."""
    listed: bool = False
    """Calls may be in a JSON array."""
    id_begins: str = "call_"
    id_characters: int = 24


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Reasoning is the text between `open` and `close` at the beginning of an output."""

    open: str
    close: str
    most: int | None = None
    """Most tokens of it; None: unlimited."""


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """What to parse an output for; a part that is None is not parsed."""

    calls: ToolCallFormat | None = None
    reasoning: ReasoningFormat | None = None
    reasons_already: bool = False
    """The prompt ended within reasoning."""

    @property
    def marks(self) -> str:
        """All marks around calls and reasoning."""
        calls = () if self.calls is None else (self.calls.open, self.calls.begin, self.calls.end, self.calls.close)
        tags = () if self.calls is None or self.calls.tags is None else (self.calls.tags.open, self.calls.tags.close)
        reasoning = () if self.reasoning is None else (self.reasoning.open, self.reasoning.close)
        return " ".join((*calls, *tags, *reasoning))


HERMES = ToolCallFormat(  # Hermes, Qwen2.5, Qwen3, and all models whose template does not mention tools
    "hermes",
    ("<tool_call>",),
    "<tool_call>",
    re.compile(r"\s*" + _NAMED),
    wrapped=True,
    begin='\n{{"name": "{name}", "arguments": ',
    end="}\n",
    close="</tool_call>",
    between="\n",
)

_XML_HEAD = re.compile(r"\s*<function=(?P<name>[^>\n]{1,64})>")

_MISTRAL_IDS = {"id_begins": "", "id_characters": 9}  # their templates accept no other


def wide(text: str) -> str:
    """A text with DeepSeek's characters for the bars and blanks in its marks."""
    return text.replace("|", "\uff5c").replace("_", "\u2581")


_DEEPSEEK: dict[str, Any] = {
    "open": wide("<|tool_calls_begin|>"),
    "separator": wide("<|tool_call_begin|>"),
    "close": wide("<|tool_calls_end|>"),
}
_DEEPSEEK_NAME = wide(r"\s*(?:<|tool_call_begin|>)?%s(?P<name>[^\s<`{]{1,64})%s\s*(?=\{)")

TOOL_CALL_FORMATS = (
    ToolCallFormat(
        "deepseek_v3",
        (wide("<|tool_calls_begin|>"), "```json"),
        **_DEEPSEEK,
        head=re.compile(_DEEPSEEK_NAME % (wide("function<|tool_sep|>"), r"\s*```json")),
        between="\n",
        begin=wide("<|tool_call_begin|>function<|tool_sep|>{name}\n```json\n"),
        end=wide("\n```<|tool_call_end|>"),
    ),
    ToolCallFormat(
        "deepseek_v31",
        (wide("<|tool_calls_begin|>"),),
        **_DEEPSEEK,
        head=re.compile(_DEEPSEEK_NAME % ("", wide("<|tool_sep|>"))),
        begin=wide("<|tool_call_begin|>{name}<|tool_sep|>"),
        end=wide("<|tool_call_end|>"),
    ),
    ToolCallFormat(
        "seed_oss",
        ("<seed:tool_call>",),
        "<seed:tool_call>",
        _XML_HEAD,
        tags=ArgumentTags(),
        begin="\n<function={name}>\n",
        end="</function>\n",
        close="</seed:tool_call>",
        between="\n",
    ),
    ToolCallFormat(
        "qwen3_coder",
        ("<tool_call>", "<function="),
        "<tool_call>",
        _XML_HEAD,
        tags=ArgumentTags(),
        begin="\n<function={name}>\n",
        end="</function>\n",
        close="</tool_call>",
        between="\n",
    ),
    ToolCallFormat(
        "mistral",
        ("[TOOL_CALLS]", "[ARGS]"),
        "[TOOL_CALLS]",
        **_MISTRAL_IDS,
        head=re.compile(r"\s*(?P<name>[^\[\]{}\s]{1,64})\[ARGS\]\s*(?=\{)"),
        begin="{name}[ARGS]",
    ),
    ToolCallFormat(
        "mistral_list",
        ("[TOOL_CALLS]",),
        "[TOOL_CALLS]",
        **_MISTRAL_IDS,
        head=re.compile(r"\s*(?:\[\s*)?" + _NAMED),
        wrapped=True,
        listed=True,
        begin='{{"name": "{name}", "arguments": ',
        end="}",
        separator=",",
        close="]",
        first="[",
        between=", ",
    ),
    ToolCallFormat(
        "llama3",
        ("<|python_tag|>",),
        "<|python_tag|>",
        re.compile(r"\s*" + _NAMED),
        wrapped=True,
        bare=True,
        begin='{{"name": "{name}", "parameters": ',
        end="}",
        separator=";",
        between="; ",
    ),
    HERMES,
)
"""More specific ones first."""

HARMONY = "<|channel|>"
"""Text in templates with the harmony format of gpt-oss: channels, which this server can't parse."""

LLAMA_3_2 = '{"name": function name, "parameters": dictionary of argument name and its value}'
"""Text in templates of Llama 3.2; they have no `<|python_tag|>`."""

REASONING_FORMATS = (
    ReasoningFormat("<seed:think>", "</seed:think>"),
    ReasoningFormat("[THINK]", "[/THINK]"),
    ReasoningFormat("<think>", "</think>"),
)


_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")

_CALL = {"content": "json", "transform": {"type": "function", "function": "{content}"}}

_LITERAL = re.compile(r"(?:\\s\*)?((?:[^\\.^$*+?{}\[\]|()]|\\\W)+)")
"""A regular expression that matches one text, optionally after blanks."""


def declared(template: Any) -> OutputSyntax:
    """The formats in a checkpoint's own `response_template` (transformers'): reasoning between marks, and calls as JSON
    of a name and arguments between marks. The chat template determines the rest.
    """
    fields = template.get("fields") if isinstance(template, dict) else None
    known = {name: field for name, field in (fields or {}).items() if isinstance(field, dict)}
    marks = {name: pair for name, field in known.items() if all(pair := (_mark(field, "open"), _mark(field, "close")))}
    reasoning = next((ReasoningFormat(*marks[name]) for name in _REASONING_FIELDS if name in marks), None)
    calls, how = marks.get("tool_calls"), known.get("tool_calls", {})
    if calls is None or not _CALL.items() <= how.items() or how.get("content_args"):
        return OutputSyntax(None, reasoning)
    return OutputSyntax(replace(HERMES, name="declared", open=calls[0], close=calls[1]), reasoning)


def _mark(field: Mapping[str, Any], name: str) -> str:
    text, pattern = field.get(name), field.get(f"{name}_pattern")
    if isinstance(text, str):
        return text
    found = _LITERAL.fullmatch(pattern) if isinstance(pattern, str) else None
    return "" if found is None else re.sub(r"\\(.)", r"\1", found[1])


def tool_call_format_of(template: str) -> ToolCallFormat:
    """The call format of the model with this chat template."""
    if LLAMA_3_2 in template:
        return next(each for each in TOOL_CALL_FORMATS if each.bare)
    return next((each for each in TOOL_CALL_FORMATS if all(sign in template for sign in each.signs)), HERMES)


def reasoning_format_of(template: str, is_token: Callable[[str], bool]) -> ReasoningFormat | None:
    """The reasoning format of the model with this chat template; None if it does not reason."""
    return next((each for each in REASONING_FORMATS if each.close in template or is_token(each.close)), None)
