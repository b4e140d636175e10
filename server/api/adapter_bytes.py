"""Adapters that are sent as bytes: in JSON with base64, or in a form that is written to disk as it comes."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

from pydantic import RootModel
from starlette.requests import Request

from ...memory.files.content_store import Draft, StoreFull, TooLarge
from ...memory.files.format import CONFIG_FILE, WEIGHTS_FILE
from ..access.limits import check_json
from ..errors import ApiError, read_body, validated
from ..http.form import boundary_of, pieces

if TYPE_CHECKING:
    from ..engine.adapter_loads import AdapterLoads
    from ..settings import Settings

CONFIG, WEIGHTS = "adapter_config", "adapter_model"
"""Fields of the two files."""

FILES = {CONFIG: CONFIG_FILE, WEIGHTS: WEIGHTS_FILE}
MAX_FIELD_BYTES = 64 << 10
WRITE_BYTES = 1 << 20


@asynccontextmanager
async def read_adapter(
    request: Request, loads: AdapterLoads, settings: Settings
) -> AsyncIterator[tuple[dict[str, Any], Draft | None]]:
    """The fields of a request that loads an adapter, and the files if it brings them: they stay within the block.

    Raises an ApiError for what is neither JSON nor a form, too large, or not taken here.
    """
    boundary = boundary_of(request.headers.get("content-type", ""))
    if boundary is not None:
        with _files(loads) as draft:
            yield await _read_form(request, loads, draft, boundary), draft
        return
    most = settings.max_body_bytes
    if loads.loaded is not None:
        most = max(most, settings.max_adapter_bytes * 4 // 3 + MAX_FIELD_BYTES)
    async with read_body(request, most) as body:
        is_long = len(body) > MAX_FIELD_BYTES
        fields = await loads.beside(_json, body, settings) if is_long else _json(body, settings)
    if not fields.keys() & FILES.keys():
        yield fields, None
        return
    with _files(loads) as draft:
        config, weights = fields.pop(CONFIG, None), fields.pop(WEIGHTS, None)
        await loads.beside(_write_json, draft, config, weights)
        yield fields, draft


@contextmanager
def _files(loads: AdapterLoads) -> Iterator[Draft]:
    if loads.loaded is None:
        message = "this server takes no adapters as bytes; start it with --adapter-uploads DIR, or give a path"
        raise ApiError(403, message, code="adapter_uploads_disabled")
    try:
        with loads.loaded.draft() as draft:
            yield draft
    except TooLarge as error:
        raise ApiError(413, f"{error}; --max-adapter-bytes allows more", param=WEIGHTS) from None
    except StoreFull as error:
        raise ApiError(503, f"{error}; try again later", code="adapter_uploads_full", retry_after=5) from None


async def _read_form(request: Request, loads: AdapterLoads, draft: Draft, boundary: bytes) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    buffer = bytearray()
    room, tenant = request.app.state.gate.bodies, request.state.tenant
    room.take(tenant, WRITE_BYTES)  # at most so much of the body is in memory
    try:
        async for name, file_name, data in pieces(request.stream(), boundary):
            buffer += data
            file = FILES.get(name) or next((one for one in (name, file_name) if one in FILES.values()), None)
            if file is None and len(buffer) > MAX_FIELD_BYTES:
                raise ApiError(400, f"a field of the form has more than {MAX_FIELD_BYTES} bytes", param=name)
            if file is None and not data:
                fields[name] = buffer.decode("utf-8", "replace")
                buffer.clear()
            elif file is not None and (len(buffer) >= WRITE_BYTES or not data):
                await loads.beside(draft.write, file, bytes(buffer))
                buffer.clear()
    finally:
        room.give_back(tenant, WRITE_BYTES)
    _require(draft)
    return fields


def _json(body: bytes, settings: Settings) -> dict[str, Any]:
    check_json(body, settings.max_json_values)
    return validated(RootModel[dict[str, Any]], body).root


def _write_json(draft: Draft, config: Any, weights: Any) -> None:
    if isinstance(config, dict):
        config = json.dumps(config)
    if isinstance(config, str):
        draft.write(CONFIG_FILE, config.encode("utf-8", "replace"))
    if isinstance(weights, str):
        try:
            draft.write(WEIGHTS_FILE, base64.b64decode(weights, validate=True))
        except binascii.Error as error:
            raise ApiError(400, f"{WEIGHTS} is no base64: {error}", param=WEIGHTS) from None
    _require(draft)


def _require(draft: Draft) -> None:
    for field, file in FILES.items():
        if file not in draft.names:
            raise ApiError(400, f"{field}: it is missing; send {file} in it", param=field)
