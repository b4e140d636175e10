"""Arguments between tags, `<parameter=NAME>VALUE</parameter>`.

Tests: tests/server/text/test_output_parser.py, tests/server/api/test_calls_read_back.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from ...core.requests.json_schemas import moved, resolved, subschemas
from .allowed_values import NULLS, Allowed, AllowedValues, kind_of
from .argument_syntax import SPACE, ArgumentSyntax, Rules, inside_quotes, is_json, json_grammar
from .detokenizer import overlap
from .whole_schemas import under

_IN_LINE = re.compile(r'["\\\n]')
_DEFINITIONS = ("$defs", "definitions")
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


@dataclass(frozen=True)
class TaggedSyntax(ArgumentSyntax):
    """Arguments between tags.

    A text is written as it is; it ends at the first `close`, so no text has one. Other values are JSON, whose strings
    may have a `close`. A line break of these tags may be any blanks, or be missing.
    """

    open: str = "<parameter="
    named: str = ">"
    """Ends the name."""
    close: str = "</parameter>"
    around: str = "\n"
    """Belongs to the format at either end of a value."""
    after: str = "\n"
    """Follows `close`."""
    named_text: str = ""
    """Ends the name of a text, where `named` ends those of other values; "": of a text, too."""

    @property
    def marks(self) -> tuple[str, ...]:  # type: ignore[override]
        return self.open, self.named, self.close

    @cached_property
    def name_end(self) -> re.Pattern[str]:
        """Pattern of the end of a name; group `text`: it says that the value is a text."""
        ends = [f"(?:{_spaced(self.named)})"]
        if self.named_text:
            ends.insert(0, f"(?P<text>{_spaced(self.named_text)})")
        return re.compile("|".join(ends))

    def next_start(self, text: str) -> int:
        """Where the end of a name may begin, in a text that has none so far."""
        starts = []
        for mark in filter(None, (self.named, self.named_text)):
            head, _, tail = mark.partition("\n")
            last = text.rfind(head) if tail else -1
            goes_on = last >= 0 and tail.startswith(text[last + len(head) :].lstrip(SPACE))
            starts.append(last if goes_on else len(text) - overlap(text, head))
        return min(starts)

    def reader(self, schema: Mapping[str, Any], ends: Sequence[str] = ()) -> TaggedArguments:
        del ends
        return TaggedArguments(self, schema)

    def grammar(self, schema: Mapping[str, Any], rules: Rules) -> str:
        """In the order of the schema's properties. Of strings, enum and const are enforced."""
        spelt, values = rules.spelt, AllowedValues(schema)
        rules.add_unless_there(spelt.text_up_to("text_value", self.close))
        parts, required = [], values.required(schema)
        for name, each in values.properties(schema).items():
            part = f"{self._property(name, each, values, rules)} {spelt(self.after)}"
            parts.append(part if name in required else f"({part})?")
        return " ".join(parts)

    def _property(self, name: str, schema: Any, values: AllowedValues, rules: Rules) -> str:
        """The tags of one property, and its value."""
        spelt, allowed = rules.spelt, values.of(schema)
        end = spelt(self.around + self.close)

        def after(named: str, value: str) -> str:
            return f"{spelt(f'{self.open}{name}{named}{self.around}')} {value}"

        if not allowed.is_text:
            return after(self.named, f"{value_grammar(schema, values.root)} {end}")
        null = after(self.named, f'"null" {end}') if allowed.is_nullable else ""
        named = self.named_text or self.named
        if allowed.texts is None:
            text = after(named, "text_value")
            return f"({text} | {null})" if null and self.named_text else text
        text = after(named, f"({' | '.join(map(json.dumps, allowed.texts))}) {end}")
        return f"({text} | {null})" if null else text

    def unwritable(self, schema: Mapping[str, Any]) -> str | None:
        if (found := dangling(schema)) is not None:
            return found
        values = AllowedValues(schema)
        for name, each in values.properties(schema).items():
            where, allowed = f"properties.{name}", values.of(each)
            if not self._can_name(name):
                named = self.named.partition("\n")[0]
                return f"{where}: this model's format of tool calls can't write a name with {named} or blanks around it"
            if (reason := wrong_texts(allowed, self.close)) is not None:
                return f"{where}: {reason}"
        return None

    def _can_name(self, name: str) -> bool:
        """True if a property's name is read back as it is."""
        found = self.name_end.search(f"{name}{self.named_text or self.named}")
        return found is not None and found.start() == len(name) and name == name.strip()


def value_grammar(schema: Any, whole: Mapping[str, Any]) -> str:
    """The grammar of a value that is JSON. whole: the schema of all arguments, to whose parts it may refer."""
    schema = schema if isinstance(schema, Mapping) else {}
    alone = {**{name: whole[name] for name in _DEFINITIONS if name in whole}, **schema}
    if any(_refers_elsewhere(each) for _, each in subschemas(alone)):
        alone = {"$defs": {"arguments": moved(whole, "/$defs/arguments")}, **moved(schema, "/$defs/arguments")}
    return json_grammar(alone)


def dangling(schema: Mapping[str, Any]) -> str | None:
    """Say which reference of a schema means nothing within it; None: there is none."""
    for path, each in subschemas(schema):
        reference = each.get("$ref")
        if isinstance(reference, str) and not isinstance(resolved(reference, schema), Mapping | bool):
            return f"{under(path, '$ref')}: {reference!r} is no schema within this one"
    return None


def _refers_elsewhere(schema: Mapping[str, Any]) -> bool:
    """True if a schema refers to a part of its document other than the definitions."""
    reference = schema.get("$ref")
    return isinstance(reference, str) and not reference.startswith(tuple(f"#/{name}/" for name in _DEFINITIONS))


def wrong_texts(allowed: Allowed, close: str) -> str | None:
    """Say why a value can't be written, whose text would end at `close`; None: it can."""
    if allowed.kinds == frozenset():
        return "its const, enum, anyOf, oneOf, allOf or type allows no value"
    if allowed.is_text and any(close in text for text in allowed.texts or ()):
        return f"this model's format of tool calls can't write a value with {close}"
    return None


def _spaced(text: str) -> str:
    """Pattern of a text in which a line break may be any blanks."""
    return r"\s*".join(map(re.escape, text.split("\n")))


class TaggedArguments:
    """Reads arguments between tags.

    A value is a string, or null, if the tag or the schema says so; otherwise the JSON that it spells, or a string.
    """

    def __init__(self, syntax: TaggedSyntax, schema: Mapping[str, Any]) -> None:
        self._syntax = syntax
        self._root, self._values = schema, AllowedValues(schema)
        self._value: TextValue | JsonValue | None = None  # that is being read
        self._begun = False
        self._searched = 0  # how far a name has been searched for its end
        self.held = ""

    def read(self, text: str, *, final: bool) -> tuple[str, str | None]:
        given = ""
        while True:
            if self._value is None:
                piece, text, more = self._name(text)
            else:
                piece, text, more = self._value.read(text, final=final)
                self._value = None if more else self._value
            given += piece
            if more is not True:
                self.held = text
                return given, text if more is None else None

    def _name(self, text: str) -> tuple[str, str, bool | None]:
        """A piece of JSON, the rest of the text, and whether to go on: None at the arguments' end."""
        text, opening = text.lstrip(SPACE), self._syntax.open
        if text.startswith(opening):
            found = self._syntax.name_end.search(text, max(len(opening), self._searched))
            if found is None:
                self._searched = self._syntax.next_start(text)
                return "", text, False
            self._searched = 0
            name = text[len(opening) : found.start()].strip()
            allowed = (
                self._values.of(self._values.inner(self._root, name))
                if not self._syntax.named_text
                else Allowed()
                if found["text"] is None
                else _TEXT
            )
            self._value = value_reader(allowed, self._syntax.around, self._syntax.close)
            piece = (", " if self._begun else "{") + json.dumps(name, ensure_ascii=False) + ": "
            self._begun = True
            return piece, text[found.end() :], True
        if opening.startswith(text):
            return "", text, False
        return "}" if self._begun else "{}", text, None


_TEXT = Allowed({"string": None})


def value_reader(allowed: Allowed, around: str, close: str) -> TextValue | JsonValue:
    """A reader of a value. around: belongs to neither end of a text. close: the closing tag."""
    if allowed.is_text:
        return TextValue(around, close, is_nullable=allowed.is_nullable)
    return JsonValue(close, allowed)


class TextValue:
    """A value that is written as it is, up to the first closing tag, or null. A text is given as it comes."""

    def __init__(self, around: str, close: str, *, is_nullable: bool) -> None:
        """around: belongs to neither end of it. close: the closing tag."""
        self._around, self._close = around, close
        blanks = ("", around)
        ways = product(blanks, NULLS, blanks) if is_nullable else ()
        self._nulls = tuple(f"{before}{word}{after}{close}" for before, word, after in ways)
        self._begun = False

    def read(self, text: str, *, final: bool) -> tuple[str, str, bool]:
        """Return a piece of JSON, the rest of the text, and whether the value has ended."""
        piece, around, closing = "", self._around, self._close
        if not self._begun:
            if (null := next((each for each in self._nulls if text.startswith(each)), None)) is not None:
                return "null", text[len(null) :], True
            if not final and any(each.startswith(text) for each in self._nulls):
                return "", text, False
        if not self._begun:
            if len(text) < len(around) and around.startswith(text):
                return "", text, False
            piece, self._begun, text = '"', True, text.removeprefix(around)
        end = text.find(closing)
        if end >= 0:
            return piece + inside_quotes(text[:end].removesuffix(around)) + '"', text[end + len(closing) :], True
        shown = text[: len(text) - overlap(text, closing)].removesuffix(around)
        return piece + inside_quotes(shown), text[len(shown) :], False


class JsonValue:
    """A value that is JSON, up to the first closing tag outside its strings; other text ends at the first of all."""

    def __init__(self, close: str, allowed: Allowed) -> None:
        """close: the closing tag."""
        self._close, self._allowed = close, allowed
        self._outside = re.compile('"|' + re.escape(close))
        self._first = -1  # where the first closing tag is
        self._searched = 0  # how far it has been searched for
        self._at = 0  # how far the text has been read
        self._in_string = False

    def read(self, text: str, *, final: bool) -> tuple[str, str, bool]:
        """Return the value, the rest of the text, and whether the value has ended."""
        if self._first < 0:
            self._first = text.find(self._close, self._searched)
            self._searched = max(0, len(text) - len(self._close))
        end = self._end(text)
        if end < 0 and final:
            end = self._first
        if end < 0:
            return "", text, False
        value = text[:end].strip(SPACE)
        if end > self._first and not is_json(value):
            end, value = self._first, text[: self._first].strip(SPACE)
        return _json_of(value, self._allowed), text[end + len(self._close) :], True

    def _end(self, text: str) -> int:
        """Where the closing tag is; -1: not in the text so far."""
        if self._at == 0 and not text.lstrip(SPACE).startswith(('"', "[", "{")):
            return self._first
        while True:
            found = (_IN_LINE if self._in_string else self._outside).search(text, self._at)
            if found is None:
                kept = 0 if self._in_string else overlap(text, self._close)
                self._at = max(self._at, len(text) - kept)
                return -1
            mark, self._at = found[0], found.end()
            if mark == "\\":
                self._at += 1  # may be after the text's end: the next character is escaped
            elif mark == '"':
                self._in_string = not self._in_string
            elif mark == "\n":  # not JSON: no string of it has a line break
                self._at = max(self._at - 1, 0)
                return self._first
            else:
                return found.start()


def _json_of(text: str, allowed: Allowed) -> str:
    """The JSON that a text spells, or otherwise the string, also where only that is allowed, or is of the types."""
    spelt = _OF_PYTHON.get(text, text)
    if is_json(spelt):
        value, kinds = json.loads(spelt), allowed.kinds or ()
        if value in allowed or "string" not in kinds or not (text in allowed or kind_of(value) not in kinds):
            return spelt
    return json.dumps(text, ensure_ascii=False)
