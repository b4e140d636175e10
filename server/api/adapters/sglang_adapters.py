"""SGLang's two routes for adapters.

Tests: tests/server/api/adapters/test_sglang_adapters.py
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Annotated, ClassVar

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ....memory.adapters.store import UnknownAdapter
from ....memory.adapters.versions import full_name
from ...engine.engine_view import AdapterState
from ...errors import ApiError, JsonResponse
from ...settings import AdapterName
from .adapter_api import AdapterApi, AdapterBody, AdapterPath, NamedAdapter, known_name, pin_adapter, shown_path


class LoadOfSglang(NamedAdapter):
    """POST /load_lora_adapter."""

    keeps_labels: ClassVar[bool] = True
    takes_files: ClassVar[bool] = False
    to_replace: ClassVar[str] = " To replace it, load it from another path, or POST /unload_lora_adapter first."

    name: AdapterName = Field(alias="lora_name")
    path: AdapterPath | None = Field(default=None, alias="lora_path")
    pinned: bool | None = None
    """None: the name stays as it is."""


class UnloadOfSglang(AdapterBody):
    """POST /unload_lora_adapter."""

    lora_name: Annotated[str, Field(min_length=1)]


class SglangAdapters:
    """Handlers. A refusal has the same members as a success, with its reason."""

    def __init__(self, adapters: AdapterApi) -> None:
        self._adapters = adapters

    async def load(self, request: Request) -> Response:
        try:
            asked = await self._adapters.read(LoadOfSglang, request)
            replace = await self._lies_elsewhere(asked)
            seen, replaced = await self._adapters.load(request, asked, None, replace=replace)
            with known_name(asked.name, "lora_name"):  # another client may have removed it meanwhile
                if asked.pinned:
                    return await self._pin(request, asked.name, seen, replaced=replaced)
                if asked.pinned is False:
                    await asyncio.wrap_future(self._adapters.names.unpin(asked.name))
        except ApiError as error:
            return await self._answer(request, error)
        return await self._answer(request)

    async def _pin(self, request: Request, name: str, seen: AdapterState, *, replaced: bool) -> Response:
        """Pin a loaded adapter. If that fails, a new one is removed again, so that the whole request has failed; one
        that replaced another stays, since the other may be gone, and the answer says that it is not pinned.
        """
        try:
            await pin_adapter(self._adapters.names, name, self._adapters.load_seconds)
        except ApiError as error:
            if replaced:
                return await self._answer(request, note=f"{name!r} is loaded, but not pinned: {error}")
            with suppress(ApiError):  # it is gone already
                await self._adapters.unload(request, full_name(seen.name, seen.label), "lora_name", force=False)
            raise
        return await self._answer(request)

    async def _lies_elsewhere(self, asked: LoadOfSglang) -> bool:
        """True if the name stands for files at another path: prime-rl's client loads each version under one name, where
        SGLang's unload it first.
        """
        try:
            seen = await asyncio.wrap_future(self._adapters.names.state(asked.name))
        except UnknownAdapter:
            return False
        found = await self._adapters.find(asked.path or "", "lora_path")
        return found != seen.manifest.path

    async def unload(self, request: Request) -> Response:
        try:
            asked = await self._adapters.read(UnloadOfSglang, request)
            await self._adapters.unload(request, asked.lora_name, "lora_name", force=False)
        except ApiError as error:
            return await self._answer(request, error)
        return await self._answer(request)

    async def _answer(self, request: Request, error: ApiError | None = None, note: str = "") -> Response:
        listing = await asyncio.wrap_future(self._adapters.names.listing())
        loaded = await self._adapters.threads.run(
            lambda: {one.name: shown_path(one.manifest.path, request) for one in listing.adapters()}
        )
        body = {"success": error is None, "error_message": str(error or note), "loaded_adapters": loaded}
        if error is None:
            return JsonResponse(body)
        retry = {} if error.retry_after is None else {"retry-after": str(max(1, round(error.retry_after)))}
        return JsonResponse(body, status_code=error.status, headers=retry)
