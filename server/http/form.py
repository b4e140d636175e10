"""Bodies of multipart/form-data, part by part as they come."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator
from email.message import Message
from typing import NamedTuple

from ..errors import ApiError

MAX_HEAD_BYTES = 8 << 10
MAX_PARTS = 64


class Piece(NamedTuple):
    """A piece of a part. name: the field's. file_name: None of a field that is no file."""

    name: str
    file_name: str | None
    data: bytes


def boundary_of(content_type: str) -> bytes | None:
    """What is between the parts of a form; None for a body of another type."""
    header = Message()
    header["content-type"] = content_type
    if header.get_content_type() != "multipart/form-data":
        return None
    boundary = header.get_boundary("")
    if not re.fullmatch(r"[\x21-\x7e ]{1,70}", boundary):
        raise ApiError(400, "multipart/form-data needs a boundary of at most 70 characters")
    return b"\r\n--" + boundary.encode()


async def pieces(body: AsyncIterator[bytes], boundary: bytes) -> AsyncIterator[Piece]:
    """The pieces of all parts in order, an empty one at the end of each. Raises an ApiError for what is no form."""
    form = _Form(boundary)
    async for data in body:
        for piece in form.read(data):
            yield piece
    if not form.is_over:
        raise ApiError(400, "the form ends before its last boundary")


class _Form:
    """What has come of a form. is_over: its last boundary came; what follows means nothing."""

    def __init__(self, boundary: bytes) -> None:
        self._boundary = boundary
        self._buffer = bytearray(b"\r\n")
        self._part: tuple[str, str | None] | None = None
        self._num_parts = 0
        self.is_over = False

    def read(self, data: bytes) -> Iterator[Piece]:
        buffer, boundary = self._buffer, self._boundary
        buffer += data
        while not self.is_over and (self._part is not None or self._begin()):
            assert self._part is not None
            end = buffer.find(boundary)
            upto = end if end >= 0 else max(0, len(buffer) - len(boundary))
            if upto:
                yield Piece(*self._part, bytes(buffer[:upto]))
                del buffer[:upto]
            if end < 0:
                return
            yield Piece(*self._part, b"")
            self._part = None

    def _begin(self) -> bool:
        """Read a part's head; False while that is not whole, and at the form's end."""
        buffer, boundary = self._buffer, self._boundary
        start, end = buffer.find(boundary), buffer.find(b"\r\n\r\n")
        if start == 0 and buffer[len(boundary) : len(boundary) + 2] == b"--":
            self.is_over = True
            return False
        if end < 0:
            if len(buffer) > MAX_HEAD_BYTES:
                raise ApiError(400, "the form's parts can't be told apart; send multipart/form-data")
            return False
        self._num_parts += 1
        if start != 0 or self._num_parts > MAX_PARTS:
            raise ApiError(400, f"a form has at most {MAX_PARTS} parts, each behind its boundary")
        self._part = _head(bytes(buffer[len(boundary) + 2 : end]))
        del buffer[: end + 4]
        if buffer.startswith(boundary[2:]):  # an empty part may end at once
            buffer[:0] = b"\r\n"
        return True


def _head(lines: bytes) -> tuple[str, str | None]:
    header = Message()
    for line in lines.decode("utf-8", "replace").split("\r\n"):
        name, _, value = line.partition(":")
        if name.strip().lower() == "content-disposition":
            header["content-disposition"] = value.strip()
    name, file_name = header.get_param("name", None, "content-disposition"), header.get_filename()
    if not isinstance(name, str):
        raise ApiError(400, "a part of the form has no name")
    return name, file_name
