"""JSON written in pieces that are short enough not to delay other threads."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

SLICE = 32
"""Items of a `Sliced` array in one piece."""

PLAIN_SLICE = 1024
"""Numbers or texts of an array in one piece."""


LONG_PIECE = 1024
"""Bytes whose writing takes noticeable time."""


class Sliced:
    """An array that makes its items while it is written."""

    __slots__ = ("_items", "_make")

    def __init__(self, items: Sequence[Any], make: Callable[[Any], Any]) -> None:
        self._items = items
        self._make = make

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return map(self._make, self._items)

    def slices(self) -> Iterator[list[Any]]:
        for start in range(0, len(self._items), SLICE):
            yield [self._make(item) for item in self._items[start : start + SLICE]]


def sliced(items: Sequence[Any], make: Callable[[Any], Any]) -> list[Any] | Sliced:
    """An array made at once if it is short, else while it is written."""
    return [make(item) for item in items] if len(items) <= SLICE else Sliced(items, make)


def dumps(value: Any) -> bytes:
    """A value's JSON, written at once; numbers that are not finite become null. Raises TypeError without JSON."""
    return orjson.dumps(value, _plain)


def pieces(value: Any) -> Iterator[bytes]:
    """A value's JSON; joined, the pieces equal the result of `dumps`."""
    if isinstance(value, dict) and value:
        opening = b"{"
        for name, item in value.items():
            yield b"%b%b:" % (opening, dumps(name))
            yield from pieces(item)
            opening = b","
        yield b"}"
    elif isinstance(value, Sliced):
        yield from _array([dumps(part)[1:-1]] for part in value.slices())
    elif isinstance(value, list | tuple) and value and isinstance(value[0], dict | Sliced):
        yield from _array(pieces(item) for item in value)
    elif isinstance(value, list | tuple) and len(value) > PLAIN_SLICE:
        starts = range(0, len(value), PLAIN_SLICE)
        yield from _array([dumps(value[start : start + PLAIN_SLICE])[1:-1]] for start in starts)
    else:
        yield dumps(value)


def _array(items: Iterator[Any]) -> Iterator[bytes]:
    """An array of items, each given as pieces; a piece may hold several items."""
    opening = b"["
    for item in items:
        for piece in item:
            yield opening + piece
            opening = b""
        opening = b","
    yield b"]" if opening != b"[" else b"[]"


def encode(value: Any) -> bytes:
    """A value's JSON, written piece by piece; other threads get the interpreter half of the time."""
    written, began = [], time.perf_counter()
    for piece in pieces(value):
        written.append(piece)
        if len(piece) > LONG_PIECE:
            time.sleep(time.perf_counter() - began)
            began = time.perf_counter()
    return b"".join(written)


def _plain(value: Any) -> Any:
    if isinstance(value, Sliced):
        return list(value)
    raise TypeError(f"{type(value).__name__} has no JSON")
