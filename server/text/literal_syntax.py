"""Arguments as literals of a programming language: `f(a=1, b="x")`, `f{a:1,b:<|"|>x<|"|>}`.

Tests: tests/server/text/test_output_parser.py, tests/server/api/test_calls_read_back.py
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .argument_syntax import SPACE, ArgumentSyntax, Rules, inside_quotes, json_grammar, refuse_constant
from .detokenizer import overlap

_KEY = re.compile(r"[^\W\d][\w.\-]*")
_WORDS = {"True": "true", "False": "false", "None": "null"}
_NUMBERS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
_MOST_DEPTH = 64


@dataclass(frozen=True)
class LiteralSyntax(ArgumentSyntax):
    """Arguments as `name`, `named`, a literal and so on, up to `close`.

    Texts stand between `quote`, as they are, or with an empty `quote` between quotation marks with Python's escapes.
    """

    close: str = ")"
    named: str = "="
    between: str = ", "
    quote: str = ""
    words: Sequence[str] = ("True", "False", "None")

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return (self.quote,)

    def reader(self, schema: Mapping[str, Any]) -> LiteralArguments:
        return LiteralArguments(self, schema)

    def grammar(self, schema: Mapping[str, Any], rules: Rules) -> str:
        """Names in the order of the schema. Patterns and lengths of texts, and counts of items, are not enforced."""
        members = _LiteralGrammar(self, schema, rules).members(schema, self.named, quoted=False)
        return f"{members} {rules.spelt(self.close)}"

    def unwritable(self, schema: Mapping[str, Any]) -> str | None:
        for name in schema.get("properties") or {}:
            if _KEY.fullmatch(name) is None:
                return f"properties.{name}: this model's format of tool calls writes no such name"
        return None


class _LiteralGrammar:
    """Writes the grammar of literals that match a schema."""

    def __init__(self, syntax: LiteralSyntax, root: Mapping[str, Any], rules: Rules) -> None:
        self._syntax, self._root, self._rules = syntax, root, rules
        self._spelt = rules.spelt

    def members(self, schema: Mapping[str, Any], named: str, *, quoted: bool) -> str:
        """The members of an object, without what is around them: each optional one may be left out."""
        properties, required = schema.get("properties") or {}, {*(schema.get("required") or ())}
        parts = [
            (self._member(name, each, named, quoted=quoted), name in required) for name, each in properties.items()
        ]
        return self._listed(parts)

    def _listed(self, parts: Sequence[tuple[str, bool]]) -> str:
        """Members in order, a separator between any two that are there. After the first required one it is simple."""
        between, first = self._spelt(self._syntax.between), next((i for i, part in enumerate(parts) if part[1]), None)
        if first is None:
            options = [self._rest(parts, index, between) for index in range(len(parts))]
            return f"({' | '.join(options)})?" if options else '""'
        before = "".join(f"({part} {between})? " for part, _ in parts[:first])
        return before + self._rest(parts, first, between)

    @staticmethod
    def _rest(parts: Sequence[tuple[str, bool]], index: int, between: str) -> str:
        """The member at an index, and those behind it."""
        text = parts[index][0]
        for part, is_required in parts[index + 1 :]:
            text += f" {between} {part}" if is_required else f" ({between} {part})?"
        return text

    def _member(self, name: str, schema: Any, named: str, *, quoted: bool) -> str:
        key = json.dumps(name, ensure_ascii=False) if quoted else name
        return f"{self._spelt(key + named)} {self.value(schema)}"

    def value(self, schema: Any) -> str:
        """The grammar of a value."""
        if not isinstance(schema, Mapping) or not schema:
            return self._any()
        if (reference := schema.get("$ref")) is not None:
            return self._referred(str(reference))
        if "const" in schema or isinstance(schema.get("enum"), list):
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return self._one_of(self._spelt(self.literal(each)) for each in values)
        for several in ("anyOf", "oneOf"):
            if isinstance(schema.get(several), list):
                return self._one_of(self.value(each) for each in schema[several])
        kinds = schema.get("type")
        if isinstance(kinds, list):
            return self._one_of(self.value({**schema, "type": kind}) for kind in kinds)
        return self._of_kind(kinds, schema)

    def _of_kind(self, kind: Any, schema: Mapping[str, Any]) -> str:
        true, false, null = self._syntax.words
        if kind in ("integer", "number"):
            return json_grammar({"type": kind, **{name: schema[name] for name in _NUMBERS if name in schema}})
        if kind == "boolean":
            return f"({self._spelt(true)} | {self._spelt(false)})"
        if kind == "null":
            return self._spelt(null)
        if kind == "string":
            return self._text()
        if kind == "array":
            return self._array(self.value(schema.get("items", {})))
        if kind == "object" or "properties" in schema:
            return self._object(schema)
        return self._any()

    def _array(self, item: str) -> str:
        return self._rules.named("array", f'"[" ({item} ({self._spelt(self._syntax.between)} {item})*)? "]"')

    def _object(self, schema: Mapping[str, Any]) -> str:
        if not schema.get("properties"):
            return self._any_object() if schema.get("additionalProperties", True) is not False else '"{" "}"'
        is_quoted = not self._syntax.quote
        return f'"{{" {self.members(schema, ": " if is_quoted else ":", quoted=is_quoted)} "}}"'

    def _referred(self, reference: str) -> str:
        name, is_new = self._rules.reserve("referred", f"{id(self._root)} {reference}")
        if is_new:
            found: Any = self._root
            for part in reference.removeprefix("#/").split("/"):
                found = found.get(part, {}) if isinstance(found, Mapping) else {}
            self._rules.add(f"{name}: {self.value(found)}")
        return name

    def _one_of(self, options: Iterable[str]) -> str:
        return f"({' | '.join(dict.fromkeys(options))})"

    def _text(self) -> str:
        if self._syntax.quote:
            self._rules.add_unless_there(self._spelt.text_up_to("quoted_text", self._syntax.quote))
            return f"{self._spelt(self._syntax.quote)} quoted_text"
        self._rules.add_unless_there(r'QUOTED: /"([^"\\\n\r]|\\["\\nrt])*"/')
        return "QUOTED"

    def _any(self) -> str:
        name, is_new = self._rules.reserve("any", "any value")
        if is_new:
            self._rules.add(f"{name}: {self._text()} | {json_grammar({'type': 'number'})} | {self._plain()}")
        return name

    def _plain(self) -> str:
        words = " | ".join(map(self._spelt, self._syntax.words))
        return f"{words} | {self._array(self._any())} | {self._any_object()}"

    def _any_object(self) -> str:
        name, is_new = self._rules.reserve("any_object", "any object")
        if is_new:
            is_quoted = not self._syntax.quote
            key = f'{self._text()} ": "' if is_quoted else 'NAME ":"'
            if not is_quoted:
                self._rules.add_unless_there(r"NAME: /[A-Za-z_][A-Za-z0-9_]*/")
            member, between = f"{key} {self._any()}", self._spelt(self._syntax.between)
            self._rules.add(f'{name}: "{{" ({member} ({between} {member})*)? "}}"')
        return name

    def literal(self, value: Any) -> str:
        """A value as it is written."""
        true, false, null = self._syntax.words
        if value is True or value is False or value is None:
            return null if value is None else true if value else false
        if isinstance(value, str):
            return f"{self._syntax.quote}{value}{self._syntax.quote}" if self._syntax.quote else _python_text(value)
        if isinstance(value, list):
            return f"[{self._syntax.between.join(map(self.literal, value))}]"
        if isinstance(value, dict):
            is_quoted = not self._syntax.quote
            pairs = (
                f"{_python_text(name)}: {self.literal(each)}" if is_quoted else f"{name}:{self.literal(each)}"
                for name, each in value.items()
            )
            return f"{{{self._syntax.between.join(pairs)}}}"
        return json.dumps(value)


def _python_text(text: str) -> str:
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    return '"' + "".join(escapes.get(letter, letter) for letter in text) + '"'


_BARE = re.compile(r"""[,()\[\]{}"']""")
_OPENING, _CLOSING = "([{", ")]}"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<octal>[0-7]{1,3})|(?P<other>(?:.|\n)))"
)
_LONGEST_ESCAPE = 10


@dataclass(slots=True)
class _Open:
    """A bracket that is open. closing: what closes it; count: members so far."""

    closing: str
    is_list: bool
    count: int = 0


class LiteralArguments:
    """Reads literals, and gives them as JSON. Texts are given as they come, other values when they are complete.

    A value without a name is that of the next property of the schema. What is no literal is a text.
    """

    def __init__(self, syntax: LiteralSyntax, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._syntax = syntax
        self._positions = [*properties] if isinstance(properties, Mapping) else []
        self._open: list[_Open] = []
        self._quote = ""  # of the text that is being read
        self._step = self._begin
        self.held = ""

    def read(self, text: str, *, final: bool) -> tuple[str, str | None]:
        given = ""
        while True:
            piece, text, more = self._step(text, final)
            given += piece
            if more is not True:
                self.held = text
                return given, text if more is None else None

    # Each step returns a piece of JSON, the rest of the text, and whether to go on: None at the arguments' end.

    def _begin(self, text: str, final: bool) -> tuple[str, str, bool | None]:
        del final
        self._open.append(_Open(self._syntax.close, is_list=False))
        self._step = self._member
        return "{", text, True

    def _member(self, text: str, final: bool) -> tuple[str, str, bool | None]:
        """At the beginning of a member, or at the end of all."""
        text, inside = text.lstrip(SPACE), self._open[-1]
        if text.startswith(inside.closing):
            return self._closed(text)
        if not text:
            return "", text, False
        if inside.is_list:
            name: str | None = None
        else:
            found = self._name(text, final)
            if found is None:
                return "", text, False
            name, text = found
        piece = ", " if inside.count else ""
        inside.count += 1
        self._step = self._value
        return piece + ("" if name is None else f"{json.dumps(name, ensure_ascii=False)}: "), text, True

    def _name(self, text: str, final: bool) -> tuple[str, str] | None:
        """A member's name, and the rest; None: the text may go on."""
        is_python = not self._syntax.quote
        if is_python and len(self._open) > 1:
            key = _quoted(text)
            if key is None and text[0] in "\"'" and not final:
                return None
            name, rest = (
                key if key is not None else (text.partition(":")[0].strip(), text[len(text.partition(":")[0]) :])
            )
            rest = rest.lstrip(SPACE)
            return (name, rest.removeprefix(":")) if rest or final else None
        if not is_python:
            name, mark, rest = text.partition(":")
            if not mark and not final:
                return None
            return name.strip().removeprefix(self._syntax.quote).removesuffix(self._syntax.quote), rest
        found = _KEY.match(text)
        rest = text[found.end() :].lstrip(SPACE) if found else text
        if found and len(rest) < 2 and rest in ("", "=") and not final:
            return None
        if found and rest.startswith("=") and not rest.startswith("=="):
            return found[0], rest[1:]
        position = self._open[-1].count
        return (self._positions[position] if position < len(self._positions) else f"{position}"), text

    def _value(self, text: str, final: bool) -> tuple[str, str, bool | None]:
        text = text.lstrip(SPACE)
        if not text:
            return "", text, False
        quote = self._syntax.quote
        if quote and len(text) < len(quote) and quote.startswith(text) and not final:
            return "", text, False
        if quote and text.startswith(quote):
            return self._begin_text(quote, text)
        if not quote and text[0] in "\"'":
            if text in ('"', "'", '""', "''") and not final:
                return "", text, False
            return self._begin_text(text[0] * 3 if text.startswith(('"""', "'''")) else text[0], text)
        if text[0] in "[{" and len(self._open) < _MOST_DEPTH:
            is_list = text[0] == "["
            self._open.append(_Open("]" if is_list else "}", is_list))
            self._step = self._member
            return text[0], text[1:], True
        end = self._bare_end(text)
        if end < 0 and not final:
            return "", text, False
        end = len(text) if end < 0 else end
        self._step = self._after
        return self._json_of(text[:end].strip(SPACE)), text[end:], True

    def _begin_text(self, quote: str, text: str) -> tuple[str, str, bool]:
        self._quote, self._step = quote, self._text
        return '"', text[len(quote) :], True

    def _text(self, text: str, final: bool) -> tuple[str, str, bool | None]:
        """Within a text."""
        quote = self._quote
        if self._syntax.quote:
            end = text.find(quote)
            shown = text[:end] if end >= 0 else text[: len(text) - overlap(text, quote)]
            piece, rest = inside_quotes(shown), text[len(shown) :]
        else:
            piece, rest = _unescaped(text, quote, final)
        if not rest.startswith(quote):
            return piece, rest, False
        self._step = self._after
        return piece + '"', rest[len(quote) :], True

    def _after(self, text: str, final: bool) -> tuple[str, str, bool | None]:
        """Behind a value; what is there before a comma or the end is passed over."""
        end = self._bare_end(text)
        if end < 0:
            return "", text, False
        text = text[end:]
        if text[0] == ",":
            self._step = self._member
            return "", text[1:], True
        return self._closed(text)

    def _closed(self, text: str) -> tuple[str, str, bool | None]:
        """At the bracket that closes a list, an object or the arguments."""
        closed = self._open.pop()
        self._step = self._after
        return "]" if closed.is_list else "}", text[1:], True if self._open else None

    def _bare_end(self, text: str) -> int:
        """Where a value that is not quoted ends: at a comma or a closing bracket of none that it opens; -1: not yet."""
        depth, at = 0, 0
        while (found := _BARE.search(text, at)) is not None:
            mark, at = found[0], found.end()
            if mark in "\"'":
                if not self._syntax.quote and (end := _quoted(text[found.start() :])) is not None:
                    at = len(text) - len(end[1])
            elif mark in _OPENING:
                depth += 1
            elif depth == 0:
                return found.start()
            elif mark != ",":
                depth -= 1
        return -1

    def _json_of(self, text: str) -> str:
        """The JSON of a literal that is not a text; a text otherwise."""
        text = _WORDS.get(text, text)
        try:
            json.loads(text, parse_constant=refuse_constant)
        except (ValueError, RecursionError):
            return _python_json(text)
        return text


def _python_json(text: str) -> str:
    """The JSON of a Python literal; the text itself, if it is none that JSON has."""
    try:
        return json.dumps(ast.literal_eval(text), allow_nan=False, ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)


def _quoted(text: str) -> tuple[str, str] | None:
    """The text in the quotation marks that a text begins with, and the rest; None if they are not closed."""
    if not text.startswith(('"', "'")):
        return None
    piece, rest = _unescaped(text[1:], text[0], final=False)
    return (json.loads(f'"{piece}"'), rest[1:]) if rest.startswith(text[0]) else None


def _unescaped(text: str, quote: str, final: bool) -> tuple[str, str]:
    """A piece of a JSON string of a text in quotation marks, and the rest: at the marks, or at what may go on."""
    piece, at = "", 0
    while True:
        mark, escape = text.find(quote, at), text.find("\\", at)
        if escape < 0 or 0 <= mark < escape:
            kept = len(text) - overlap(text, quote) if mark < 0 else mark
            return piece + inside_quotes(text[at : max(at, kept)]), text[max(at, kept) :]
        piece += inside_quotes(text[at:escape])
        found = _ESCAPE.match(text, escape)
        is_open = found is None or (found["octal"] and found.end() == len(text)) or (found["other"] or "") in "xuU"
        if is_open and len(text) - escape < _LONGEST_ESCAPE and not final:
            return piece, text[escape:]
        if found is None:
            return piece, ""
        piece += _letter(found)
        at = found.end()


def _letter(escape: re.Match[str]) -> str:
    """What an escape of Python stands for, as a piece of a JSON string."""
    code = escape["x"] or escape["u"] or escape["U"]
    if code is not None or escape["octal"] is not None:
        number = int(code, 16) if code is not None else int(escape["octal"], 8)
        return json.dumps(chr(number))[1:-1] if number < 0x110000 else inside_quotes(escape[0])
    other = escape["other"]
    return inside_quotes(_ESCAPES.get(other, other if other in "\\\"'" else f"\\{other}"))
