"""Reads literals of a programming language as JSON, as they arrive.

Tests: tests/server/text/test_tool_call_formats.py
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .argument_syntax import SPACE, inside_quotes, is_json
from .detokenizer import overlap

KEY = re.compile(r"[^\W\d][\w.\-]*")
"""Pattern of an argument's name."""

_WORDS = {"True": "true", "False": "false", "None": "null"}
_MOST_DEPTH = 64
_BARE = re.compile(r"""[,()\[\]{}"']""")
_PREFIX = re.compile(r"(?:^|\W)[bfruBFRU]{0,2}\Z")
"""Pattern of what stands before a text in quotation marks, up to three characters."""
_MARK = re.compile(r"""["'\\]""")
_MOST_NAME = 256
"""Characters of an argument's name: more of them are a value."""
_OPENING, _CLOSING = "([{", ")]}"
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "f": "\f", "v": "\v", "\n": ""}
_ESCAPE = re.compile(
    r"\\(?:x(?P<x>[0-9a-fA-F]{2})|u(?P<u>[0-9a-fA-F]{4})|U(?P<U>[0-9a-fA-F]{8})|(?P<octal>[0-7]{1,3})|(?P<other>(?:.|\n)))"
)
_LONGEST_ESCAPE = 10
_FOLLOWS = ",)]}:"
"""What may follow a text in quotation marks."""
_MOST_BLANKS = 64
"""Blanks between a quotation mark and what follows it: after more of them a text has ended."""


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

    def __init__(self, close: str, quote: str, schema: Mapping[str, Any]) -> None:
        """close: what ends the arguments. quote: what is around texts; "": quotation marks, with Python's escapes."""
        properties = schema.get("properties")
        self._close, self._marks = close, quote
        self._positions = [*properties] if isinstance(properties, Mapping) else []
        self._open: list[_Open] = []
        self._quote = ""  # of the text that is being read
        self._scanned = self._depth = 0  # how far a value that is not quoted has been read, and brackets open there
        self._searched = 0  # how far the end of a name, or of quoted text in such a value, has been searched
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
        self._open.append(_Open(self._close, is_list=False))
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
        if self._marks:
            found = self._named(text, final)
            return found and (found[0].removeprefix(self._marks).removesuffix(self._marks), found[1])
        return self._key(text, final) if len(self._open) > 1 else self._keyword(text, final)

    def _key(self, text: str, final: bool) -> tuple[str, str] | None:
        """The key of a Python dictionary, and the rest."""
        end = self._text_end(text, 1) if text[0] in "\"'" else None
        if end is not None and end < 0 and not final:
            return None
        self._searched = 0 if end is not None else self._searched
        key = None if end is None or end < 0 else _quoted(text[: end + _MOST_BLANKS])
        if end is None or key is None:
            return self._named(text, final)
        rest = text[end:].lstrip(SPACE)
        return (key, rest.removeprefix(":")) if rest or final else None

    def _named(self, text: str, final: bool) -> tuple[str, str] | None:
        """A name up to a colon, and the rest."""
        at = text.find(":", self._searched)
        self._searched = 0 if at >= 0 or final else len(text)
        if at < 0:
            return (text.strip(), "") if final else None
        return text[:at].strip(), text[at + 1 :]

    def _keyword(self, text: str, final: bool) -> tuple[str, str] | None:
        """The name of an argument, and the rest; a value without one has that of the next property."""
        found = KEY.match(text, 0, _MOST_NAME)
        rest = text[found.end() :].lstrip(SPACE) if found else text
        if found and rest in ("", "=") and not final and len(text) < _MOST_NAME:
            return None
        if found and rest.startswith("=") and not rest.startswith("=="):
            return found[0], rest[1:]
        position = self._open[-1].count
        return (self._positions[position] if position < len(self._positions) else f"{position}"), text

    def _value(self, text: str, final: bool) -> tuple[str, str, bool | None]:
        text = text.lstrip(SPACE)
        quote = self._quote_of(text, final) if text else None
        if quote is None:
            return "", text, False
        if quote:
            self._quote, self._step = quote, self._text
            return '"', text[len(quote) :], True
        if text[0] in "[{" and len(self._open) < _MOST_DEPTH:
            is_list = text[0] == "["
            self._open.append(_Open("]" if is_list else "}", is_list))
            self._step = self._member
            return text[0], text[1:], True
        end = self._bare_end(text, final)
        if end < 0 and not final:
            return "", text, False
        end = len(text) if end < 0 else end
        self._step = self._after
        return _json_of(text[:end].strip(SPACE)), text[end:], True

    def _quote_of(self, text: str, final: bool) -> str | None:
        """What quotes the value that a text begins with; "": nothing; None: the text may go on."""
        if self._marks:
            if self._marks.startswith(text) and text != self._marks and not final:
                return None
            return self._marks if text.startswith(self._marks) else ""
        if text[0] not in "\"'":
            return ""
        if text in ('"', "'", '""', "''") and not final:
            return None
        return text[0] * 3 if text.startswith(('"""', "'''")) else text[0]

    def _text(self, text: str, final: bool) -> tuple[str, str, bool | None]:
        """Within a text."""
        quote = self._quote
        if self._marks:
            end = text.find(quote)
            shown = text[:end] if end >= 0 else text[: len(text) - overlap(text, quote)]
            piece, rest, has_ended = inside_quotes(shown), text[len(shown) :], end >= 0
        else:
            piece, rest, has_ended = _unescaped(text, quote, final=final)
        if not has_ended:
            return piece, rest, False
        self._step = self._after
        return piece + '"', rest[len(quote) :], True

    def _after(self, text: str, final: bool) -> tuple[str, str, bool | None]:
        """Behind a value; what is there before a comma or the end is passed over."""
        end = self._bare_end(text, final)
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

    def _bare_end(self, text: str, final: bool) -> int:
        """Where a value that is not quoted ends: at a comma or a closing bracket of none that it opens; -1: not yet."""
        while (found := _BARE.search(text, self._scanned)) is not None:
            mark, at = found[0], found.end()
            if mark in "\"'":
                at = self._behind_quoted(text, at, final)
                if at < 0:
                    return -1
            elif mark in _OPENING:
                self._depth += 1
            elif self._depth == 0:
                self._scanned = 0
                return found.start()
            elif mark != ",":
                self._depth -= 1
            self._scanned = at
        self._scanned = len(text)
        return -1

    def _behind_quoted(self, text: str, at: int, final: bool) -> int:
        """Where a text in quotation marks ends, or its first mark if it is none; -1: not yet. at: behind that."""
        if self._marks or not _PREFIX.search(text[max(0, at - 4) : at - 1]):  # an apostrophe
            return at
        end = self._text_end(text, at)
        if end < 0 and not final:
            self._scanned = at - 1
            return -1
        self._searched = 0
        return at if end < 0 else end

    def _text_end(self, text: str, at: int) -> int:
        """Where a text in quotation marks ends that begins at a position; -1: not yet."""
        quote, at = text[at - 1], max(at, self._searched)
        while (found := _MARK.search(text, at)) is not None:
            if found[0] == "\\":
                at = found.end() + 1
            elif found[0] == quote:
                ends = _ends(text, found.end(), final=False)
                if ends:
                    return found.end()
                at = found.end()
                if ends is None:
                    self._searched = found.start()
                    return -1
            else:
                at = found.end()
        self._searched = max(at, len(text))
        return -1


def _json_of(text: str) -> str:
    """The JSON of a literal that is not quoted; the text itself, if it is none that JSON has."""
    text = _WORDS.get(text, text)
    if is_json(text):
        return text
    try:
        return json.dumps(ast.literal_eval(text), allow_nan=False, ensure_ascii=False)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return json.dumps(text, ensure_ascii=False)


def _quoted(text: str) -> str | None:
    """The text in the quotation marks that a text begins with; None if they are not closed."""
    piece, _, has_ended = _unescaped(text[1:], text[0], final=False)
    return json.loads(f'"{piece}"') if has_ended else None


def _unescaped(text: str, quote: str, *, final: bool) -> tuple[str, str, bool]:
    """A piece of a JSON string of a text in quotation marks, the rest (at the marks, or at what may go on), and whether
    the text has ended: a mark that nothing of `_FOLLOWS` follows is one of the text, which some models do not escape.
    """
    piece, at = "", 0
    while True:
        mark, escape = text.find(quote, at), text.find("\\", at)
        if mark >= 0 and (escape < 0 or mark < escape):
            if (ends := _ends(text, mark + len(quote), final=final)) is not False:
                return piece + inside_quotes(text[at:mark]), text[mark:], ends is True
            piece += inside_quotes(text[at : mark + 1])
            at = mark + 1
            continue
        if escape < 0:
            kept = max(at, len(text) - overlap(text, quote))
            return piece + inside_quotes(text[at:kept]), text[kept:], False
        piece += inside_quotes(text[at:escape])
        found = _ESCAPE.match(text, escape)
        if not final and _is_open(found, len(text) - escape):
            return piece, text[escape:], False
        if found is None:
            return piece, "", False
        piece += _letter(found)
        at = found.end()


def _is_open(escape: re.Match[str] | None, length: int) -> bool:
    """True if an escape may go on behind so many characters."""
    if length >= _LONGEST_ESCAPE:
        return False
    if escape is None:
        return True
    return bool(escape["octal"] and escape.end() == len(escape.string)) or (escape["other"] or "") in "xuU"


def _ends(text: str, at: int, *, final: bool) -> bool | None:
    """True if a text ends at the quotation mark before a position; None: it depends on what follows."""
    behind = text[at : at + _MOST_BLANKS].lstrip(SPACE)
    if behind:
        return behind[0] in _FOLLOWS
    return True if final or len(text) - at >= _MOST_BLANKS else None


def _letter(escape: re.Match[str]) -> str:
    """What an escape of Python stands for, as a piece of a JSON string."""
    code = escape["x"] or escape["u"] or escape["U"]
    if code is not None or escape["octal"] is not None:
        number = int(code, 16) if code is not None else int(escape["octal"], 8)
        return json.dumps(chr(number))[1:-1] if number < 0x110000 else inside_quotes(escape[0])
    other = escape["other"]
    return inside_quotes(_ESCAPES.get(other, other if other in "\\\"'" else f"\\{other}"))
