"""Bodies of multipart/form-data, read part by part as they arrive.

Tests: tests/server/api/adapters/test_adapter_versions.py
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from email.message import Message
from typing import NamedTuple

from python_multipart.exceptions import MultipartParseError
from python_multipart.multipart import MultipartParser, MultipartState

from ..errors import ApiError

MAX_PARTS = 64
MAX_HEADERS = 8
MAX_HEADER_BYTES = 4096

logging.getLogger("python_multipart").setLevel(logging.ERROR)  # it logs the errors that its caller raises


class Piece(NamedTuple):
    """A piece of a part."""

    name: str
    """The field's."""
    file_name: str | None
    """None if the field is not a file."""
    data: bytes


def boundary_of(content_type: str) -> bytes | None:
    """The boundary between the parts of a form; None for a body of another type."""
    header = Message()
    header["content-type"] = content_type
    if header.get_content_type() != "multipart/form-data":
        return None
    with _readable("content-type"):
        boundary = header.get_boundary("")
    if not re.fullmatch(r"[\x21-\x7e ]{1,70}", boundary):
        raise ApiError(400, "multipart/form-data needs a boundary of at most 70 characters")
    return boundary.encode()


async def pieces(body: AsyncIterator[bytes], boundary: bytes) -> AsyncIterator[Piece]:
    """Pieces of all parts in order, with an empty piece after each part. Raises an ApiError if invalid."""
    form = _Form(boundary)
    async for data in body:
        for piece in form.read(data):
            yield piece
    if not form.is_over:
        raise ApiError(400, "the form ends before its last boundary")


@contextmanager
def _readable(header: str) -> Iterator[None]:
    """Reading parameters of a header: those that `email` can't put together or decode (RFC 2231) are a 400."""
    try:
        yield
    except (TypeError, ValueError, LookupError):
        message = f'{header} has parameters that can\'t be read; write each as NAME="VALUE", without a * in its name'
        raise ApiError(400, message) from None


class _Form:
    """The state of a form being read. is_over: its last boundary came; later bytes mean nothing."""

    def __init__(self, boundary: bytes) -> None:
        self._pieces: list[Piece] = []
        self._num_parts = 0
        self._header = Message()  # headers of the part that matter here
        self._field, self._value = bytearray(), bytearray()  # the current header line
        self._part: tuple[str, str | None] = "", None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._field.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_line,
                "on_headers_finished": self._end_head,
                "on_part_data": lambda data, start, end: self._give(data[start:end]),
                "on_part_end": lambda: self._give(b""),
            },
            max_header_count=MAX_HEADERS,
            max_header_size=MAX_HEADER_BYTES,
        )

    @property
    def is_over(self) -> bool:
        return self._parser.state is MultipartState.END

    def read(self, data: bytes) -> list[Piece]:
        self._pieces = found = []
        try:
            self._parser.write(data)
        except MultipartParseError as error:
            raise ApiError(400, f"the body is no multipart/form-data: {error}") from None
        return found

    def _begin_part(self) -> None:
        self._num_parts += 1
        if self._num_parts > MAX_PARTS:
            raise ApiError(400, f"a form has at most {MAX_PARTS} parts")
        self._header = Message()

    def _end_line(self) -> None:
        if self._field.lower() == b"content-disposition":
            self._header["content-disposition"] = self._value.decode("utf-8", "replace")
        self._field.clear()
        self._value.clear()

    def _end_head(self) -> None:
        with _readable("a part's content-disposition"):
            name, file_name = self._header.get_param("name", None, "content-disposition"), self._header.get_filename()
        if not isinstance(name, str) or not name:
            raise ApiError(400, "a part of the form has no name")
        self._part = name, file_name

    def _give(self, data: bytes) -> None:
        self._pieces.append(Piece(*self._part, data))
