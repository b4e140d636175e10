"""Reads arguments that are nested elements: see `nested_syntax`.

Tests: tests/server/text/test_nested_syntax.py, tests/server/api/test_calls_read_back.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .allowed_values import AllowedValues
from .argument_syntax import SPACE
from .detokenizer import overlap
from .tagged_syntax import JsonValue, TextValue, value_reader

MAX_NAME = 256
"""Most characters of an element's name."""

_MAX_DEPTH = 64
"""Of elements in one another; those below are text."""


@dataclass
class _Container:
    """An element that has elements."""

    name: str
    schema: Any
    is_list: bool
    count: int = 0
    """Elements that it has already."""

    def lead(self, name: str) -> str:
        """The JSON before an element's value."""
        before = ", " if self.count else "[" if self.is_list else "{"
        self.count += 1
        return before if self.is_list else f"{before}{json.dumps(name, ensure_ascii=False)}: "

    @property
    def end(self) -> str:
        """The JSON behind the last element."""
        return ("" if self.count else "[" if self.is_list else "{") + ("]" if self.is_list else "}")


class NestedArguments:
    """Reads arguments that are elements.

    An element with elements is a list if its schema says so, or says nothing and the first of them has the name of an
    item; otherwise it is an object. One without is a text if its schema says so, else the JSON that it spells, or a
    text.
    """

    def __init__(self, mark: str, item: str, schema: Mapping[str, Any]) -> None:
        self._mark, self._item = mark, item
        self._values = AllowedValues(schema)
        self._open = [_Container("", schema, is_list=False)]
        self._begun: tuple[str, Any] | None = None  # an element whose kind is not known yet
        self._value: TextValue | JsonValue | None = None  # that is being read
        self.held = ""

    def read(self, text: str, *, final: bool) -> tuple[str, str | None]:
        given = ""
        while True:
            if self._value is not None:
                piece, text, more = self._value.read(text, final=final)
                self._value = None if more else self._value
            elif self._begun is not None:
                piece, text, more = self._kind(*self._begun, text, final=final)
            else:
                piece, text, more = self._tag(text)
            given += piece
            if more is not True:
                self.held = text
                return given, text if more is None else None

    # Each of these returns a piece of JSON, the rest of the text, and whether to go on: None at the arguments' end.

    def _tag(self, text: str) -> tuple[str, str, bool | None]:
        """At the beginning of a tag, or before it."""
        text, mark = text.lstrip(SPACE), self._mark
        if mark.startswith(text):
            return "", text, False
        if not text.startswith(mark):
            return self._no_tag(text, text)
        tag = text[len(mark) :]
        if tag in ("", "<"):
            return "", text, False
        closes = tag.startswith("</")
        if closes and len(self._open) == 1:
            return self._open[0].end, text, None
        end = tag.find(">", 1, MAX_NAME + 3) if tag.startswith("<") else -1
        if end >= 0:
            return (
                self._closed(tag[2:end], text, tag[end + 1 :]) if closes else self._opened(tag[1:end], tag[end + 1 :])
            )
        if tag.startswith("<") and len(tag) <= MAX_NAME + 2:
            return "", text, False
        return self._no_tag(text, tag)

    def _no_tag(self, text: str, rest: str) -> tuple[str, str, bool | None]:
        """Where no tag is: the end of the arguments, or a text between elements, which means nothing, up to a mark."""
        if len(self._open) == 1:
            return self._open[0].end, text, None
        at = rest.find(self._mark)
        return "", rest[at:] if at >= 0 else rest[len(rest) - overlap(rest, self._mark) :], at >= 0

    def _opened(self, name: str, rest: str) -> tuple[str, str, bool]:
        """Behind the opening tag of an element."""
        around = self._open[-1]
        schema = self._values.inner(around.schema, around.count if around.is_list else name)
        lead, allowed = around.lead(name), self._values.of(schema)
        if allowed.is_text:
            self._value = value_reader(allowed, "", self._close_of(name))
        else:
            self._begun = name, schema
        return lead, rest, True

    def _closed(self, name: str, text: str, rest: str) -> tuple[str, str, bool]:
        """At the closing tag of an element with elements, or of one around it."""
        closed = self._open.pop()
        return closed.end, rest if closed.name == name else text, True

    def _kind(self, name: str, schema: Any, text: str, *, final: bool) -> tuple[str, str, bool]:
        """Behind the opening tag of an element that may have elements."""
        close, seen = self._close_of(name), text.lstrip(SPACE)
        item = f"{self._mark}<{self._item}>"
        if any(each != seen and each.startswith(seen) for each in (close, item)) and not final:
            return "", text, False
        self._begun = None
        allowed = self._values.of(schema)
        kinds = allowed.kinds
        if seen.startswith(close):
            return (
                _EMPTY.get(_container(kinds) if "string" not in (kinds or ()) else "", '""'),
                seen[len(close) :],
                True,
            )
        begin = f"{self._mark}<"
        if seen.startswith(begin) and not seen.startswith(f"{begin}/") and len(self._open) < _MAX_DEPTH:
            kind = _container(kinds) or ("array" if seen.startswith(item) else "object")
            self._open.append(_Container(name, schema, is_list=kind == "array"))
            return "", seen, True
        self._value = value_reader(allowed, "", close)
        return "", text, True

    def _close_of(self, name: str) -> str:
        return f"{self._mark}</{name}>"


_EMPTY = {"array": "[]", "object": "{}"}
"""The value of an element without text, by what it must be."""


def _container(kinds: frozenset[str] | None) -> str:
    """Which value with elements the kinds of a schema allow; "": none, or the schema doesn't say."""
    return next((each for each in _EMPTY if kinds is not None and each in kinds), "")
