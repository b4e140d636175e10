"""How the arguments of a tool call are written: one description for the parser and for the grammar.

Tests: tests/server/text/test_output_parser.py, tests/server/api/test_calls_read_back.py
"""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Protocol

from ...core.requests.grammars import JSON_OPTIONS
from ...core.requests.speller import ANY_TEXT, Speller
from .detokenizer import overlap

SPACE = " \t\r\n"

_OUTSIDE = r'["{}\[\]]'
_INSIDE = re.compile(r'["\\]')


class ArgumentReader(Protocol):
    """Converts the text of a call's arguments to pieces of JSON, as it arrives."""

    held: str
    """Text whose meaning depends on the following text."""

    def read(self, text: str, *, final: bool) -> tuple[str, str | None]:
        """Return the certain part of a text as JSON, and the text after the arguments once they end; the rest stays in
        `held`. final: no text follows.
        """
        ...


class Rules:
    """The rules of a grammar in llguidance's dialect of Lark, and how its texts are spelt."""

    def __init__(self, spelt: Speller) -> None:
        self.spelt = spelt
        self._rules = [ANY_TEXT]
        self._names: dict[str, str] = {}  # of rules that are shared, by what they say

    def add(self, rule: str) -> None:
        """Add a whole rule, `name: …`."""
        self._rules.append(rule)

    def add_unless_there(self, rule: str) -> None:
        if rule not in self._rules:
            self._rules.append(rule)

    def named(self, prefix: str, body: str) -> str:
        """The name of the rule with this body, which is added if it is not there yet."""
        if body not in self._names:
            self._names[body] = f"{prefix}_{len(self._names)}"
            self.add(f"{self._names[body]}: {body}")
        return self._names[body]

    def reserve(self, prefix: str, key: str) -> tuple[str, bool]:
        """A name for a key, and whether it is new: then its rule must be added."""
        is_new = key not in self._names
        if is_new:
            self._names[key] = f"{prefix}_{len(self._names)}"
        return self._names[key], is_new

    def text(self, start: str) -> str:
        return "\n".join(("%llguidance {}", f"start: {start}", *self._rules))


class ArgumentSyntax(ABC):
    """A way to write arguments."""

    is_json: bool = False
    """True if a grammar may allow any JSON object, where nothing else is asked for."""

    marks: tuple[str, ...] = ()
    """Texts of it that may be special tokens."""

    @abstractmethod
    def reader(self, schema: Mapping[str, Any], ends: Sequence[str] = ()) -> ArgumentReader:
        """A reader of one call's arguments. schema: of the function's arguments. ends: marks that end a call; they also
        end JSON that is not complete, outside of strings.
        """

    @abstractmethod
    def grammar(self, schema: Mapping[str, Any], rules: Rules) -> str:
        """The grammar of such arguments, which may need further rules."""

    def unwritable(self, schema: Mapping[str, Any]) -> str | None:
        """Say which of a function's arguments can't be written so; None: all can."""
        del schema


class JsonSyntax(ArgumentSyntax):
    """Arguments as a JSON object."""

    is_json = True

    def __init__(self, ends: Sequence[str] = ()) -> None:
        """ends: marks that end arguments outside of strings, even if the JSON is not complete."""
        self._ends = ends

    def reader(self, schema: Mapping[str, Any], ends: Sequence[str] = ()) -> ArgumentReader:
        del schema
        return JsonArguments((*self._ends, *ends))

    def grammar(self, schema: Mapping[str, Any], rules: Rules) -> str:
        del rules
        return json_grammar(schema)


def json_grammar(schema: Mapping[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": JSON_OPTIONS})


@cache
def _outside(ends: tuple[str, ...]) -> re.Pattern[str]:
    """Pattern of what matters outside of strings."""
    return re.compile("|".join((_OUTSIDE, *map(re.escape, ends))))


class JsonEnd:
    """Finds the end of a JSON object or array in a growing text."""

    __slots__ = ("_depth", "_in_string", "_outside", "at")

    def __init__(self, depth: int = 0, ends: Sequence[str] = ()) -> None:
        """depth: number of brackets that are open already. ends: see `JsonSyntax`."""
        self._depth = depth
        self._outside = _outside(tuple(ends))
        self._in_string = False
        self.at = 0
        """How far the text has been read."""

    @property
    def in_string(self) -> bool:
        """True if the text that has been read ends within a string."""
        return self._in_string

    def find(self, text: str, begin: int) -> int:
        """Return the position after its end, or of the mark that ends it; -1 if there is none yet. begin: where it
        begins.
        """
        self.at = max(self.at, begin)
        while True:
            found = (_INSIDE if self._in_string else self._outside).search(text, self.at)
            if found is None:
                self.at = max(self.at, len(text))
                return -1
            mark, self.at = found[0], found.end()
            if mark == "\\":
                self.at += 1  # may be after the text's end: the next character is escaped
            elif mark == '"':
                self._in_string = not self._in_string
            elif len(mark) > 1:
                return found.start()
            else:
                self._depth += 1 if mark in "{[" else -1
                if self._depth <= 0:
                    return self.at


class JsonArguments:
    """Arguments that are JSON: passed on as they come."""

    held = ""

    def __init__(self, ends: Sequence[str] = ()) -> None:
        """ends: see `JsonSyntax`."""
        self._marks = ends
        self._ends = JsonEnd(ends=ends)

    def read(self, text: str, *, final: bool) -> tuple[str, str | None]:
        end = self._ends.find(text, 0)
        if end >= 0:
            return text[:end], text[end:]
        in_string = final or self._ends.in_string
        given = len(text) - max((0 if in_string else overlap(text, mark) for mark in self._marks), default=0)
        self._ends.at -= len(text)
        self.held = text[given:]
        return text[:given], None


def inside_quotes(text: str) -> str:
    """A piece of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def is_json(text: str) -> bool:
    try:
        json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        return False
    return True


def refuse_constant(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
