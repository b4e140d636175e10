"""Long strings of a JSON object that is read as it arrives: they are passed on in pieces, and the rest is collected."""

from __future__ import annotations

import base64
import binascii
import itertools
import json
import math
import re
from collections.abc import Collection, Iterator

_MARK = re.compile(rb'["{}\[\]:,]')
_STRING_MARK = re.compile(rb'["\\]')
_ESCAPE_BYTES = {b"u": 6}
"""Bytes of an escape sequence by its second character; all others have two."""


STEPS = 1024
"""Marks and strings after which the event loop gets a turn."""


class TooManyMarks(ValueError):
    """The text has more values than are read."""


class LongStrings:
    """Reads one object. rest: its text with empty long strings; the caller checks that it is JSON."""

    def __init__(self, fields: Collection[str], most: float = math.inf) -> None:
        """fields: names of the object's own fields whose strings are passed on. most: marks and strings that are read;
        `feed` raises TooManyMarks for more.
        """
        self._steps_left = most
        self.rest = bytearray()
        self._fields = {name.encode(): name for name in fields}
        self._depth = 0
        self._in_string = False
        self._string_at = 0  # position in `rest` of the latest string
        self._key = b""
        self._long: str | None = None
        self._escape = b""  # the key, as far as it has arrived

    def feed(self, data: bytes) -> Iterator[tuple[str, bytes]]:
        """Read the next part of the text. Yields pieces of long strings in order, with their field, and an empty one at
        each end; and nothing of no field now and then, when others should get a turn.
        """
        at = 0
        for step in itertools.count(1):
            if at >= len(data):
                return
            if step % STEPS == 0:
                yield "", b""
            self._count()
            at, piece = self._take(data, at)
            if piece is not None and self._long is not None:
                yield self._long, piece
                if not piece:
                    self._long = None

    def _take(self, data: bytes, at: int) -> tuple[int, bytes | None]:
        """Read up to the next mark; where that ends, and a piece of a string."""
        if self._escape:
            return self._take_escape(data, at)
        return self._take_string(data, at) if self._in_string else (self._take_mark(data, at), None)

    def _count(self) -> None:
        """Count a mark or a string; pieces of long strings are not counted."""
        if self._long is None:
            self._steps_left -= 1
            if self._steps_left < 0:
                raise TooManyMarks

    def _take_mark(self, data: bytes, at: int) -> int:
        found = _MARK.search(data, at)
        end = len(data) if found is None else found.end()
        self.rest += data[at:end]
        mark = b"" if found is None else found[0]
        if mark == b'"':
            self._in_string, self._string_at = True, len(self.rest)
            self._long = self._fields.get(self._key) if self._depth == 1 else None
        elif mark == b":" and self._depth == 1:
            self._key = bytes(self.rest[self._string_at :]).rpartition(b'"')[0]
        elif mark:
            self._key = b""
            self._depth += (mark in b"{[") - (mark in b"}]")
        return end

    def _take_string(self, data: bytes, at: int) -> tuple[int, bytes | None]:
        if self._long is not None and (found := self._plain(data, at)) is not None:
            return found
        mark = _STRING_MARK.search(data, at)
        end = len(data) if mark is None else mark.start()
        text = data[at:end]
        if self._long is None:
            self.rest += text
        if mark is not None and mark[0] == b"\\":
            self._escape = b"\\"
            return end + 1, text or None
        if mark is None or (text and self._long is not None):
            return end, text or None  # a quote comes next
        self._in_string = False
        self.rest += b'"'
        return end + 1, b""

    @staticmethod
    def _plain(data: bytes, at: int) -> tuple[int, bytes] | None:
        """The text up to a quote, provided it has no escapes but those of slashes, which some clients write."""
        end = data.find(b'"', at)
        text = data[at : len(data) if end < 0 else end]
        plain = text.replace(b"\\/", b"/") if b"\\" in text else text
        return (at + len(text), plain) if plain and b"\\" not in plain else None

    def _take_escape(self, data: bytes, at: int) -> tuple[int, bytes | None]:
        self._escape += data[at : at + 1]
        if len(self._escape) < _ESCAPE_BYTES.get(self._escape[1:2], 2):
            return at + 1, None
        escape, self._escape = self._escape, b""
        if self._long is None:
            self.rest += escape
            return at + 1, None
        try:
            text = json.loads(b'"' + escape + b'"').encode("utf-8", "replace")
        except ValueError:
            text = escape  # the JSON reader refuses it
        return at + 1, text


class Base64:
    """Decodes pieces of base64. Raises ValueError if they are invalid."""

    def __init__(self) -> None:
        self._left = b""
        self._is_padded = False

    def feed(self, text: bytes) -> bytes:
        """The bytes of a piece, except those that need the next piece."""
        text = self._left + text
        whole = len(text) - len(text) % 4
        self._left = text[whole:]
        return self._decoded(text[:whole])

    def close(self) -> None:
        """The text is complete."""
        if self._left:
            raise ValueError("Incorrect padding")

    def _decoded(self, text: bytes) -> bytes:
        if not text:
            return b""
        if self._is_padded:
            raise ValueError("Excess data after padding")
        self._is_padded = text.endswith(b"=")
        try:
            return base64.b64decode(text, validate=True)
        except binascii.Error as error:
            raise ValueError(str(error)) from None
