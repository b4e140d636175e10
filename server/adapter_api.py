"""The routes that show and change the adapters: our own, and vLLM's two."""

from __future__ import annotations

import asyncio
import logging
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..memory.adapter_format import WEIGHTS_FILE, AdapterFormatError, AdapterManifest
from ..memory.adapter_store import UnknownAdapter
from .adapter_requests import AddAdapter, LoadLoraAdapter, UnloadLoraAdapter
from .adapter_roots import AdapterRoots
from .errors import ApiError, read_body
from .served_model import ServedModel
from .worker import EngineWorker

if TYPE_CHECKING:
    from ..core.engine import Engine
    from ..memory.adapter import Adapter
    from ..memory.adapter_store import AdapterStore

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Seen:
    """An adapter as it was between two steps; written out elsewhere, so that no step waits for thousands of them."""

    adapter: Adapter
    tier: str
    pages: int
    references: int

    @classmethod
    def of(cls, store: AdapterStore, name: str) -> _Seen:
        adapter = store.get(name)
        return cls(adapter, store.tier(adapter).value, len(adapter.pages), adapter.references)

    def body(self) -> dict[str, Any]:
        manifest = self.adapter.manifest
        return {
            "name": self.adapter.name,
            "version": self.adapter.version,
            "rank": manifest.rank,
            "target_modules": list(manifest.targets),
            "tier": self.tier,
            "pages": self.pages,
            "references": self.references,
            "path": str(manifest.path),
        }


class AdapterApi:
    """Adapters are read and checked beside the engine, one at a time; between two steps they are only swapped."""

    def __init__(self, worker: EngineWorker, served: ServedModel) -> None:
        self._worker = worker
        self._served = served
        self._roots = AdapterRoots(served.adapter_roots)
        self._checking = asyncio.Lock()

    # --- our own ---

    async def list_all(self, _: Request) -> Response:
        seen = await self._call(lambda engine: [_Seen.of(engine.store, name) for name in engine.store.names()])
        return JSONResponse({"object": "list", "data": [one.body() for one in seen]})

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            seen = await self._call(lambda engine: _Seen.of(engine.store, name))
        except UnknownAdapter:
            raise _unknown(name, None) from None
        return JSONResponse(seen.body())

    async def add(self, request: Request) -> Response:
        """Registers an adapter, or replaces one; 201 or 200."""
        asked = AddAdapter.parse(await read_body(request, self._served.max_body_bytes))
        seen, replaced = await self._load(asked.name, asked.path, "name", "path", replace=True)
        return JSONResponse(seen.body(), status_code=200 if replaced else 201)

    async def remove(self, request: Request) -> Response:
        name = request.path_params["name"]
        await self._unload(name, None)
        return JSONResponse({"object": "adapter", "name": name, "deleted": True})

    # --- vLLM's ---

    async def load_lora_adapter(self, request: Request) -> Response:
        asked = LoadLoraAdapter.parse(await read_body(request, self._served.max_body_bytes))
        if asked.base_model_name not in (None, self._served.name, self._served.root):
            message = f"base_model_name is {asked.base_model_name!r}, this server's base model is {self._served.name!r}"
            raise ApiError(400, message, param="base_model_name")
        await self._load(asked.lora_name, asked.lora_path, "lora_name", "lora_path", replace=bool(asked.load_inplace))
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' added successfully.")

    async def unload_lora_adapter(self, request: Request) -> Response:
        asked = UnloadLoraAdapter.parse(await read_body(request, self._served.max_body_bytes))
        await self._unload(asked.lora_name, "lora_name")
        return PlainTextResponse(f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    # --- common ---

    async def _load(
        self, name: str, path: str, name_field: str, path_field: str, *, replace: bool
    ) -> tuple[_Seen, bool]:
        """The adapter once requests may use it, and whether it took another's place."""
        self._roots.require()
        if name == self._served.name:
            raise ApiError(400, f"{name_field} {name!r} is the base model's; choose another", param=name_field)
        directory = await asyncio.to_thread(self._roots.find, path, path_field)
        if not replace and await self._call(lambda engine: name in engine.store):
            raise _already_loaded(name, name_field)
        try:
            async with self._checking:
                manifest = await asyncio.to_thread(self._worker.check_adapter, directory)
            seen, replaced = await self._call(lambda engine: _swap(engine, name, manifest, replace=replace))
        except AdapterFormatError as error:
            raise ApiError(400, str(error), param=path_field, code="invalid_adapter") from None
        except FileExistsError:
            raise _already_loaded(name, name_field) from None
        log.info("%s adapter %s: version %d from %s", "replaced" if replaced else "added", name,
                 seen.adapter.version, directory)  # fmt: skip
        return seen, replaced

    async def _unload(self, name: str, field: str | None) -> None:
        self._roots.require()
        try:
            await self._call(lambda engine: engine.store.unregister(name))
        except UnknownAdapter:
            raise _unknown(name, field) from None
        log.info("removed adapter %s", name)

    async def _call(self, function: Any) -> Any:
        return await asyncio.wrap_future(self._worker.call(function))


def _swap(engine: Engine, name: str, manifest: AdapterManifest, *, replace: bool) -> tuple[_Seen, bool]:
    """Registers what was checked, on the engine's thread, and has it read. FileExistsError unless it may replace."""
    store = engine.store
    replaced = name in store
    if replaced and not replace:
        raise FileExistsError(name)
    weights = manifest.path / WEIGHTS_FILE
    try:
        status = os.stat(weights)
    except OSError as error:
        raise AdapterFormatError(f"{weights}: {error.strerror}") from None
    if (status.st_size, status.st_mtime_ns) != (manifest.file_size, manifest.mtime_ns):
        raise AdapterFormatError(f"{weights}: it changed while it was checked; load it again when it is written")
    adapter = store.register(name, Path(manifest.path))
    store.read_ahead([adapter])
    return _Seen.of(store, name), replaced


def _already_loaded(name: str, field: str) -> ApiError:
    return ApiError(
        400,
        f"The lora adapter '{name}' has already been loaded. To replace it, set 'load_inplace' to true.",
        param=field,
        code="adapter_already_loaded",
    )


def _unknown(name: str, field: str | None) -> ApiError:
    return ApiError(404, f"The lora adapter '{name}' cannot be found.", param=field, code="adapter_not_found")
