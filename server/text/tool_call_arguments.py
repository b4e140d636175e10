"""Converts the text of a tool call's arguments to pieces of JSON, as it arrives.

Tests: tests/server/text/test_output_parser.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from .detokenizer import overlap

SPACE = " \t\r\n"

_OUTSIDE = re.compile(r'["{}\[\]]')
_INSIDE = re.compile(r'["\\]')
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

    def read(self, text: str) -> tuple[str, str | None]:
        """Return the certain part of the next piece, and the text after the arguments once they end."""
        end = self._ends.find(text, 0)
        if end >= 0:
            return text[:end], text[end:]
        self._ends.at -= len(text)
        return text, None


class XmlArguments:
    """Arguments written as `<parameter=NAME>VALUE</parameter>`, up to `</function>`; converted to JSON.

    A value is a string if the schema says so; otherwise it is the JSON that it spells, or a string.
    """

    OPEN, CLOSE, END = "<parameter=", "</parameter>", "</function>"

    def __init__(self, schema: Mapping[str, Any]) -> None:
        properties = schema.get("properties")
        self._properties = properties if isinstance(properties, Mapping) else {}
        self._in_value = False
        self._is_string = False
        self._begun = False
        self._opened = False  # a string's opening quote has been returned
        self.held = ""

    def read(self, text: str) -> tuple[str, str | None]:
        """Return the certain part of the text, and the text after the arguments once they end; the rest stays in
        `held`.
        """
        given = ""
        while True:
            piece, text, more = self._value(text) if self._in_value else self._name(text)
            given += piece
            if more is not True:
                self.held = text
                return given, text if more is None else None

    def _name(self, text: str) -> tuple[str, str, bool | None]:
        """A piece of JSON, the rest of the text, and whether to go on: None at the arguments' end."""
        text = text.lstrip(SPACE)
        if text.startswith(self.OPEN):
            end = text.find(">")
            if end < 0:
                return "", text, False
            name = text[len(self.OPEN) : end].strip()
            self._is_string = _is_string(self._properties.get(name))
            self._in_value, self._opened = True, False
            piece = (", " if self._begun else "{") + json.dumps(name, ensure_ascii=False) + ": "
            self._begun = True
            return piece, text[end + 1 :], True
        if any(mark.startswith(text) and mark != text for mark in (self.OPEN, self.END)):
            return "", text, False
        return "}" if self._begun else "{}", text.removeprefix(self.END), None

    def _value(self, text: str) -> tuple[str, str, bool]:
        """The same, within a value. One line break at either end belongs to the format."""
        end = text.find(self.CLOSE)
        if not self._is_string:
            if end < 0:
                return "", text, False
            self._in_value = False
            return _json_of(text[:end].strip(SPACE)), text[end + len(self.CLOSE) :], True
        piece = ""
        if not self._opened:
            if not text:
                return "", text, False
            piece, self._opened = '"', True
            if text[0] == "\n":
                text, end = text[1:], end - 1
        if end >= 0:
            self._in_value = False
            return piece + _inside_quotes(text[:end].removesuffix("\n")) + '"', text[end + len(self.CLOSE) :], True
        shown = text[: len(text) - overlap(text, self.CLOSE)].removesuffix("\n")
        return piece + _inside_quotes(shown), text[len(shown) :], False


def _inside_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _is_string(schema: Any) -> bool:
    return isinstance(schema, Mapping) and schema.get("type") == "string"


def _json_of(text: str) -> str:
    """The JSON that a text spells, or otherwise the string."""
    text = _OF_PYTHON.get(text, text)
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text


def refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
