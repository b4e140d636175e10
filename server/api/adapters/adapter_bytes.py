"""Adapters sent as bytes, in JSON with base64 or in a form, written to disk as they arrive; or as a descriptor of a
memory file, over a Unix socket.

Tests: tests/server/api/adapters/test_adapter_versions.py, tests/server/api/adapters/test_uploads_kept.py
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, RootModel
from starlette.requests import Request

from ....memory.files.config import CONFIG_FILE
from ....memory.files.form import WEIGHTS_FILE
from ....memory.files.tokens.added_tokens import TEXT_FILES
from ....memory.files.uploads.content_store import StoreFull, TooLarge
from ...access.limits import check_json, too_many
from ...engine.adapter_loader import LoadTimedOut
from ...errors import ApiError, validated
from ...executors import PoolFull
from ...http.form import boundary_of, pieces
from ...http.json_strings import Base64, LongStrings, TooManyMarks
from ...http.unix_socket import SCOPE, Descriptors, Unsealed
from ..control_fields import refuse_query
from .upload import AdapterUpload

if TYPE_CHECKING:
    from ...engine.adapter_loader import AdapterLoader
    from ...settings import Settings

CONFIG, WEIGHTS = "adapter_config", "adapter_model"
"""Fields of the two files."""

FILES = {CONFIG: CONFIG_FILE, WEIGHTS: WEIGHTS_FILE}
_ENCODED = {WEIGHTS: WEIGHTS_FILE} | {name: name for name in TEXT_FILES}
"""Fields of a JSON body that hold a file as base64."""

UNUSED_FILES = ("README.md",)
"""Files that PEFT writes into every adapter's folder, and that are sent with it."""

MAX_FIELD_BYTES = 64 << 10
"""Bytes of the plain fields of a form together."""

MARKS_OF_VALUE = 8
"""Quotes, brackets, commas, colons and strings of a value, at most."""

WRITE_BYTES = 1 << 20


class GivenDescriptor(BaseModel):
    """The file in `adapter_model`, by the number of the descriptor among those of the connection."""

    model_config = ConfigDict(extra="forbid")

    descriptor: int = Field(ge=0)


class _GivenWeights(BaseModel):
    """The field of a body that has it, so that errors name the whole path."""

    adapter_model: GivenDescriptor


def told_of_files(text: str) -> tuple[str, str]:
    """The error of a load of uploaded files in the client's words, and the field at fault. text: begins with a file's
    path, which is the server's own.
    """
    path, _, problem = text.partition(": ")
    file = PurePath(path).name
    field = next((field for field, name in (FILES | _ENCODED).items() if name == file), None)
    return (text, WEIGHTS) if field is None else (f"{file}: {problem}", field)


@asynccontextmanager
async def read_adapter(
    request: Request, loads: AdapterLoader, settings: Settings
) -> AsyncIterator[tuple[dict[str, Any], AdapterUpload | None]]:
    """The fields of a request that loads an adapter, and the files if it contains them, which exist within the `with`
    block.

    Raises an ApiError if the body is neither JSON nor a form, is too large, or brings files to a server without
    uploads, and for a query.
    """
    refuse_query(request)
    boundary = boundary_of(request.headers.get("content-type", ""))
    upload, room, failed = AdapterUpload(loads), _HeldBytes(request), True
    try:
        if boundary is not None:
            fields = await _read_form(request, upload, room, boundary)
        else:
            fields = await _read_json(request, loads, upload, room, settings)
        yield fields, upload if upload.has_begun else None
        failed = False
    except TooLarge as error:
        raise ApiError(413, f"{error}; --max-adapter-bytes allows more", param=WEIGHTS) from None
    except StoreFull as error:
        raise ApiError(503, f"{error}; try again later", code="adapter_uploads_full", retry_after=5) from None
    except LoadTimedOut as error:
        raise ApiError(504, str(error), code="load_timed_out") from None
    except PoolFull as error:
        raise ApiError(503, f"{error}; try again later", code="loads_busy", retry_after=1) from None
    except OSError as error:  # a full or failing disk
        message = f"the files can't be read or written at the moment: {error.strerror or type(error).__name__}"
        raise ApiError(503, f"{message}; try again later", code="storage_unavailable", retry_after=1) from None
    finally:
        room.close()
        await upload.end(failed=failed)


def _length(request: Request) -> int:
    """Bytes of the body, as far as they are known."""
    length = request.headers.get("content-length", "")
    return int(length) if length.isdecimal() else 0


class _HeldBytes:
    """Count bytes of a body in memory for its tenant."""

    def __init__(self, request: Request) -> None:
        self._bodies, self._tenant = request.app.state.gate.bodies, request.state.tenant
        self._taken = 0

    def take(self, num_bytes: int) -> None:
        """Raises an ApiError if too many bytes are held."""
        self._bodies.take(self._tenant, num_bytes)
        self._taken += num_bytes

    def close(self) -> None:
        self._bodies.give_back(self._tenant, self._taken)
        self._taken = 0


async def _read_form(request: Request, upload: AdapterUpload, room: _HeldBytes, boundary: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    buffer, num_bytes = bytearray(), 0
    await upload.begin(_length(request))
    room.take(WRITE_BYTES)  # at most this much of the body is in memory
    async for name, file_name, data in pieces(request.stream(), boundary):
        file = _file_of(name, file_name)
        if file in UNUSED_FILES:
            continue
        buffer += data
        num_bytes += len(data) if file is None else 0
        if num_bytes > MAX_FIELD_BYTES:
            raise ApiError(400, f"the fields of the form have more than {MAX_FIELD_BYTES} bytes", param=name)
        if file is None and not data:
            fields[name] = buffer.decode("utf-8", "replace")
            buffer.clear()
        elif file is not None and (len(buffer) >= WRITE_BYTES or not data):
            await upload.write(file, bytes(buffer))
            buffer.clear()
    _require(upload)
    return fields


def _file_of(name: str, file_name: str | None) -> str | None:
    """The adapter's file that a part of a form is, by the name of its field or its own; None if it is a plain field."""
    known = (*FILES.values(), *TEXT_FILES, *UNUSED_FILES)
    file = FILES.get(name) or next((one for one in (name, file_name) if one in known), None)
    if file is None and file_name is not None:
        raise ApiError(400, f"{file_name!r} is no file of an adapter; leave it out", param=name)
    return file


async def _read_json(
    request: Request, loads: AdapterLoader, upload: AdapterUpload, room: _HeldBytes, settings: Settings
) -> dict[str, Any]:
    """Read a body whose weights are written to disk as they arrive, and whose other fields are small."""
    rest = await _stream_json(request, upload, room, settings)
    is_long = len(rest) > MAX_FIELD_BYTES
    fields = await loads.beside(_json, rest, settings) if is_long else _json(rest, settings)
    if not fields.keys() & {CONFIG, *_ENCODED}:
        return fields
    config = fields.pop(CONFIG, None)
    given = fields.pop(WEIGHTS) if isinstance(fields.get(WEIGHTS), dict) else None
    _drop_encoded(fields)
    if given is not None:
        number = validated(_GivenWeights, {WEIGHTS: given}).adapter_model.descriptor
        await _write_descriptor(upload, request.scope.get(SCOPE), number)
    await _write_config(upload, config)
    _require(upload)
    return fields


async def _stream_json(request: Request, upload: AdapterUpload, room: _HeldBytes, settings: Settings) -> bytes:
    """Write encoded files as they arrive; returns the body without them."""
    text = LongStrings(_ENCODED, MARKS_OF_VALUE * settings.max_json_values)
    files = {field: _Base64File(upload, field, file) for field, file in _ENCODED.items()}
    async for part in request.stream():
        before = len(text.rest)
        for field, piece in _fed(text, part, settings):
            if not field:
                await asyncio.sleep(0)
                continue
            if not upload.has_begun:
                room.take(WRITE_BYTES)
                await upload.begin(_length(request) * 3 // 4)
            await files[field].take(piece)
        room.take(len(text.rest) - before)
        if len(text.rest) > settings.max_body_bytes:
            raise ApiError(413, f"the body is larger than the {settings.max_body_bytes} bytes that this server accepts")
    return bytes(text.rest)


async def _write_config(upload: AdapterUpload, config: Any) -> None:
    await upload.begin()
    if isinstance(config, dict):
        config = json.dumps(config)
    if config is not None and not isinstance(config, str):
        message = f"{CONFIG} must be an object, or its text, not {type(config).__name__}"
        raise ApiError(400, message, param=CONFIG)
    if isinstance(config, str):
        await upload.write(CONFIG_FILE, config.encode("utf-8", "replace"))


async def _write_descriptor(upload: AdapterUpload, descriptors: Descriptors | None, number: int) -> None:
    """Copy a memory file, which its sender can't change any more, before it is loaded. Raises an ApiError."""
    if descriptors is None:
        message = f"{WEIGHTS}: descriptors come only over the Unix socket of --unix-socket"
        raise ApiError(400, message, param=WEIGHTS, code="no_descriptor")
    try:
        file = descriptors.take(number)
    except KeyError:
        message = (
            f"{WEIGHTS}: the connection has brought no descriptor {number}, or it was used; send it with the first "
            "bytes of a new connection"
        )
        raise ApiError(400, message, param=WEIGHTS, code="no_descriptor") from None
    except Unsealed as error:
        raise ApiError(400, f"{WEIGHTS}: {error}", param=WEIGHTS, code="invalid_descriptor") from None
    with file:
        if upload.has_begun and WEIGHTS_FILE in upload.names:
            raise ApiError(400, f"{WEIGHTS}: it is given twice; give it once", param=WEIGHTS)
        await upload.begin(os.fstat(file.fileno()).st_size)
        await upload.copy_beside(WEIGHTS_FILE, file)


def _fed(text: LongStrings, part: bytes, settings: Settings) -> Iterator[tuple[str, bytes]]:
    try:
        yield from text.feed(part)
    except TooManyMarks:
        raise too_many(settings.max_json_values) from None


def _drop_encoded(fields: dict[str, Any]) -> None:
    """Remove the fields of files, which were written as they arrived. Raises an ApiError for one that is no string."""
    for field in _ENCODED:
        if (value := fields.pop(field, None)) not in ("", None):
            raise ApiError(400, f"{field} must be base64 in a string, not {type(value).__name__}", param=field)


class _Base64File:
    """A file in a field of a JSON body: base64, decoded and written on a thread as it arrives."""

    def __init__(self, upload: AdapterUpload, field: str, file: str) -> None:
        self._upload, self._field, self._file = upload, field, file
        self._text = bytearray()
        self._base64 = Base64()
        self._is_over = False

    async def take(self, piece: bytes) -> None:
        """Take the next piece; an empty one is the end."""
        if self._is_over:
            raise ApiError(400, f"{self._field}: it is given twice; give it once", param=self._field)
        self._text += piece
        self._is_over = not piece
        if self._is_over or len(self._text) >= WRITE_BYTES:
            text = bytes(self._text)
            self._text.clear()
            try:
                await self._upload.write(self._file, partial(self._decoded, text, is_last=self._is_over))
            except ValueError as error:
                if isinstance(error, TooLarge):
                    raise
                raise ApiError(400, f"{self._field} must be base64: {error}", param=self._field) from None

    def _decoded(self, text: bytes, *, is_last: bool) -> bytes:
        data = self._base64.feed(text)
        if is_last:
            self._base64.close()
        return data


def _json(body: bytes, settings: Settings) -> dict[str, Any]:
    check_json(body, settings.max_json_values)
    return validated(RootModel[dict[str, Any]], body).root


def _require(upload: AdapterUpload) -> None:
    for field, file in FILES.items():
        if file not in upload.names:
            raise ApiError(400, f"{field}: it is missing; send {file} in it", param=field)
