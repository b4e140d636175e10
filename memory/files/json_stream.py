"""Reads a long JSON text piece by piece: only the value that is being read is in memory, and each has a size limit.

A value is counted before it is parsed, so a file can't take much more memory than its limit, and no call of the parser
holds the interpreter's lock for long.

Tests: tests/memory/files/test_json_stream.py
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

from . import strict_json
from .given_up import check_wanted

MAX_VALUE = 1 << 20
"""Characters of a value that is parsed in one call."""

MAX_KEY = 64 << 10
"""Characters of a key, or of an entry of a long list."""

MAX_ENTRIES = 1 << 16
"""Entries of a value that is longer than `MAX_KEY`."""

MAX_DEPTH = 16
"""Objects and lists inside each other of a value that is skipped."""

PIECE_BYTES = 64 << 10
"""Bytes of a piece that the sources of streams give."""

_OF_NUMBERS = frozenset("0123456789.eE+-")
_SPACE = re.compile(r"[ \t\r\n]*")


class MalformedJson(ValueError):
    """The text is not JSON, or a value is longer than it may be."""


class JsonStream:
    """A position in a JSON text that only moves forward. Every method raises MalformedJson."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = iter(pieces)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._json = strict_json.decoder()
        self._text = ""
        self._at = 0
        self._dropped = 0  # characters before `_text`
        self._has_ended = False
        self._num_bytes = 0

    @classmethod
    def of(cls, data: bytes) -> JsonStream:
        """A stream of a text that is in memory."""
        return cls(pieces_of(data))

    @property
    def num_bytes(self) -> int:
        """Bytes taken from the source so far."""
        return self._num_bytes

    @property
    def position(self) -> int:
        """Offset in bytes of the next value, or of the space before it."""
        pending, _ = self._decoder.getstate()
        return self._num_bytes - len(pending) - len(self._text[self._at :].encode("utf-8"))

    def value(self, most: int = MAX_VALUE) -> Any:
        """The next value, of at most so many characters. A duplicate key is an error, as in `strict_json`."""
        self.next_mark()
        while True:
            left = len(self._text) - self._at
            if left > MAX_KEY and most > MAX_KEY:
                self._check_entries()
            try:
                value, end = self._json.raw_decode(self._text, self._at)
            except (ValueError, StopIteration, RecursionError) as error:
                if self._has_ended or left > most:
                    raise self._malformed(error, left, most) from None
            else:
                if end - self._at > most:
                    raise MalformedJson(f"the value at character {self._place()} has more than {most} characters")
                if self._is_whole(end) or left > most:
                    self._at = end
                    return value
            self._fill(max(1, min(left, most + 1 - left)))

    def members(self) -> Iterator[str]:
        """Keys of the object that begins here; the caller takes each key's value."""
        self._expect("{")
        if self._take_if("}"):
            return
        while True:
            self._need('"', "a key")
            key = self.value(MAX_KEY)
            self._expect(":")
            yield key
            if self._take_if("}"):
                return
            self._expect(",")

    def entries(self) -> Iterator[int]:
        """Indices of the list that begins here; the caller takes each entry."""
        self._expect("[")
        if self._take_if("]"):
            return
        index = 0
        while True:
            yield index
            if self._take_if("]"):
                return
            self._expect(",")
            index += 1

    def skip(self, depth: int = 0) -> None:
        """Pass over the next value."""
        if depth > MAX_DEPTH:
            raise MalformedJson(f"more than {MAX_DEPTH} objects and lists inside each other")
        mark = self.next_mark()
        try:
            self.value(MAX_KEY)
        except MalformedJson:
            if not mark or mark not in "{[":
                raise
        else:
            return
        for _ in self.members() if mark == "{" else self.entries():  # it is long, or malformed
            self.skip(depth + 1)

    def finish(self) -> None:
        """Make sure that nothing follows."""
        if mark := self.next_mark():
            raise MalformedJson(f"not JSON: {mark!r} follows at character {self._place()}")

    def next_mark(self) -> str:
        """The next character that is no space; empty at the end."""
        while True:
            self._at = _SPACE.match(self._text, self._at).end()  # pyright: ignore[reportOptionalMemberAccess]
            if self._at < len(self._text) or self._has_ended:
                return self._text[self._at : self._at + 1]
            self._fill(1)

    def _expect(self, mark: str) -> None:
        self._need(mark, repr(mark))
        self._at += 1

    def _need(self, mark: str, what: str) -> None:
        if self.next_mark() != mark:
            raise MalformedJson(f"not JSON: character {self._place()} is not {what}")

    def _take_if(self, mark: str) -> bool:
        if self.next_mark() != mark:
            return False
        self._at += 1
        return True

    def _place(self) -> int:
        return self._dropped + self._at

    def _fill(self, more: int) -> None:
        """Take at least so many further characters, unless the text ends: twice as many are tried each time."""
        check_wanted()
        found, num_characters = [self._text[self._at :]], 0
        while num_characters < more and not self._has_ended:
            piece = next(self._pieces, b"")
            self._has_ended = not piece
            self._num_bytes += len(piece)
            try:
                found.append(self._decoder.decode(piece, not piece))
            except UnicodeDecodeError as error:
                raise MalformedJson(f"not UTF-8: {error.reason}") from None
            num_characters += len(found[-1])
        self._dropped += self._at
        self._text, self._at = "".join(found), 0

    def _is_whole(self, end: int) -> bool:
        """False if a number that ends there may continue in the next piece."""
        return self._has_ended or (end < len(self._text) and self._text[end] not in _OF_NUMBERS)

    def _check_entries(self) -> None:
        """Refuse a long value of so many entries that they would take much more memory than their text."""
        containers, entries = (sum(self._text.count(mark, self._at) for mark in marks) for marks in ("[{", ","))
        if containers > strict_json.MAX_CONTAINERS or entries > MAX_ENTRIES:
            raise MalformedJson(
                f"the value at character {self._place()} has more than {strict_json.MAX_CONTAINERS} lists and objects, "
                f"or {MAX_ENTRIES} entries"
            )

    def _malformed(self, error: BaseException, left: int, most: int) -> MalformedJson:
        if isinstance(error, RecursionError):
            return MalformedJson("nested too deeply")
        if isinstance(error, StopIteration):
            return MalformedJson(f"not JSON: it ends at character {self._dropped + error.value}")
        if isinstance(error, json.JSONDecodeError):
            if left > most:
                return MalformedJson(
                    f"the value at character {self._place()} has more than {most} characters, or is not JSON"
                )
            return MalformedJson(f"not JSON: {error.msg} at character {self._dropped + error.pos}")
        return MalformedJson(str(error))


def pieces_of(data: bytes) -> Iterator[bytes]:
    """A text that is in memory, in pieces."""
    return (data[at : at + PIECE_BYTES] for at in range(0, len(data), PIECE_BYTES))
