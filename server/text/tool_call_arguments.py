"""Converts the text of a tool call's arguments to pieces of JSON, as it arrives.

Tests: tests/server/text/test_output_parser.py, tests/server/api/test_calls_read_back.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .detokenizer import overlap
from .tool_call_formats import ArgumentTags

SPACE = " \t\r\n"

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
_IN_LINE = re.compile(r'["\\\n]')
_OF_PYTHON = {"True": "true", "False": "false", "None": "null"}


class JsonEnd:
    """Finds the end of a JSON object or array in a growing text."""

    __slots__ = ("_depth", "_in_string", "at")

    def __init__(self, depth: int = 0) -> None:
        """depth: number of brackets that are open already."""
        self._depth = depth
        self._in_string = False
        self.at = 0
        """How far the text has been read."""

    def find(self, text: str, begin: int) -> int:
        """Return the position after its end; -1 if there is none yet. begin: where it begins."""
        self.at = max(self.at, begin)
        while True:
            found = (_INSIDE if self._in_string else _OUTSIDE).search(text, self.at)
            if found is None:
                self.at = max(self.at, len(text))
                return -1
            mark, self.at = found[0], found.end()
            if mark == "\\":
                self.at += 1  # may be after the text's end: the next character is escaped
            elif mark == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return self.at


class JsonArguments:
    """Arguments that are JSON: passed on as they come."""

    held = ""

    def __init__(self) -> None:
        self._ends = JsonEnd()

    def read(self, text: str, *, final: bool) -> tuple[str, str | None]:
        """Return the certain part of the next piece, and the text after the arguments once they end. final: no text
        follows.
        """
        end = self._ends.find(text, 0)
        if end >= 0:
            return text[:end], text[end:]
        self._ends.at -= len(text)
        return text, None


class TaggedArguments:
    """Arguments between tags, converted to JSON.

    A value is a string if the schema says so; otherwise it is the JSON that it spells, or a string.
    """

    def __init__(self, tags: ArgumentTags, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._tags = tags
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._value: _TextValue | _JsonValue | None = None  # that is being read
        self._begun = False
        self.held = ""

    def read(self, text: str, *, final: bool) -> tuple[str, str | None]:
        """Return the certain part of the text, and the text after the arguments once they end; the rest stays in
        `held`. final: no text follows.
        """
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
        text, opening = text.lstrip(SPACE), self._tags.open
        if text.startswith(opening):
            end = text.find(self._tags.named)
            if end < 0:
                return "", text, False
            name = text[len(opening) : end].strip()
            kind = _TextValue if self._tags.is_text(self._properties.get(name)) else _JsonValue
            self._value = kind(self._tags)
            piece = (", " if self._begun else "{") + json.dumps(name, ensure_ascii=False) + ": "
            self._begun = True
            return piece, text[end + len(self._tags.named) :], True
        if opening.startswith(text):
            return "", text, False
        return "}" if self._begun else "{}", text, None


class _TextValue:
    """A value that is written as it is, up to the first closing tag. It is given as it comes."""

    def __init__(self, tags: ArgumentTags) -> None:
        self._tags = tags
        self._begun = False

    def read(self, text: str, *, final: bool) -> tuple[str, str, bool]:
        """Return a piece of JSON, the rest of the text, and whether the value has ended."""
        piece, around, closing = "", self._tags.around, self._tags.close
        if not self._begun:
            if len(text) < len(around) and around.startswith(text):
                return "", text, False
            piece, self._begun, text = '"', True, text.removeprefix(around)
        end = text.find(closing)
        if end >= 0:
            return piece + _inside_quotes(text[:end].removesuffix(around)) + '"', text[end + len(closing) :], True
        shown = text[: len(text) - overlap(text, closing)].removesuffix(around)
        return piece + _inside_quotes(shown), text[len(shown) :], False


class _JsonValue:
    """A value that is JSON, up to the first closing tag outside its strings; other text ends at the first of all."""

    def __init__(self, tags: ArgumentTags) -> None:
        self._close = tags.close
        self._outside = re.compile('"|' + re.escape(tags.close))
        self._first = -1  # where the first closing tag is
        self._at = 0  # how far the text has been read
        self._in_string = False

    def read(self, text: str, *, final: bool) -> tuple[str, str, bool]:
        """Return the value, the rest of the text, and whether the value has ended."""
        if self._first < 0:
            self._first = text.find(self._close, max(0, self._at - len(self._close)))
        end = self._end(text)
        if end < 0 and final:
            end = self._first
        if end < 0:
            return "", text, False
        value = text[:end].strip(SPACE)
        if end > self._first and not is_json(value):
            end, value = self._first, text[: self._first].strip(SPACE)
        return _json_of(value), text[end + len(self._close) :], True

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


def _inside_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _json_of(text: str) -> str:
    """The JSON that a text spells, or otherwise the string."""
    text = _OF_PYTHON.get(text, text)
    return text if is_json(text) else json.dumps(text, ensure_ascii=False)


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
