"""Bodies of multipart/form-data, part by part as they come."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
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
    buffer, head, parts, done = bytearray(b"\r\n"), None, 0, False
    async for data in body:
        if done:  # an epilogue, which means nothing
            continue
        buffer += data
        while True:
            if head is None:
                end = buffer.find(b"\r\n\r\n")
                start = buffer.find(boundary)
                if start == 0 and buffer[len(boundary) : len(boundary) + 2] == b"--":
                    done = True
                    break
                if end < 0:
                    if len(buffer) > MAX_HEAD_BYTES:
                        raise ApiError(400, "the form's parts can't be told apart; send multipart/form-data")
                    break
                parts += 1
                if start != 0 or parts > MAX_PARTS:
                    raise ApiError(400, f"a form has at most {MAX_PARTS} parts, each behind its boundary")
                head = _head(bytes(buffer[len(boundary) + 2 : end]))
                del buffer[: end + 4]
                if buffer.startswith(boundary[2:]):  # an empty part may end at once
                    buffer[:0] = b"\r\n"
            end = buffer.find(boundary)
            upto = end if end >= 0 else max(0, len(buffer) - len(boundary))
            if upto:
                yield Piece(*head, bytes(buffer[:upto]))
                del buffer[:upto]
            if end < 0:
                break
            yield Piece(*head, b"")
            head = None
    if not done:
        raise ApiError(400, "the form ends before its last boundary")


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
