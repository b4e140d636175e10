"""The routes that show and change the adapters: our own, and vLLM's two."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from ..core.quarantine import report
from ..memory.adapter_error import AdapterFormatError, shown
from ..memory.adapter_format import STEM, AdapterManifest
from ..memory.adapter_identity import open_unchanged
from ..memory.adapter_store import UnknownAdapter
from ..memory.host_image import HostImage
from ..memory.limited_threads import LimitedThreads, NoThreadLeft
from .adapter_keeper import AdapterKeeper
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

T = TypeVar("T")

MAX_LOAD_THREADS = 8
"""Loads that may be stuck, each on a thread of its own, before further ones are refused."""

MAX_LOADS = 64
"""Loads that may be asked for at once; they are checked one after another."""


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

    def body(self, request: Request) -> dict[str, Any]:
        manifest = self.adapter.manifest
        return {
            "name": self.adapter.name,
            "version": self.adapter.version,
            "rank": manifest.rank,
            "target_modules": list(manifest.targets),
            "tier": self.tier,
            "pages": self.pages,
            "references": self.references,
            "path": shown_path(manifest.path, request),
            "content_hash": manifest.content_hash,
            "no_effect": manifest.no_effect,
            "stem": None if manifest.stem == STEM else manifest.stem,
        }


class AdapterApi:
    """Adapters are read and checked beside the engine, one at a time; between two steps they are only swapped.

    load_seconds: how long a disk may take over one; then the load fails, and its thread is left behind.
    """

    def __init__(self, worker: EngineWorker, served: ServedModel, load_seconds: float = 30.0) -> None:
        self._worker = worker
        self._served = served
        self._roots = AdapterRoots(served.adapter_roots)
        self._checking = asyncio.Lock()
        self._load_seconds = load_seconds
        self._num_loads = 0
        self._threads = LimitedThreads("adapter-load", MAX_LOAD_THREADS)
        self.keeper = AdapterKeeper(worker, load_seconds)

    # --- our own ---

    async def list_all(self, request: Request) -> Response:
        seen, quarantined = await self._call(
            lambda engine: (
                [_Seen.of(engine.store, name) for name in engine.store.names()],
                list(engine.quarantine.values()),
            )
        )
        hide = request.app.state.private_paths.hide
        broken = [
            {"name": one.name, "path": shown_path(one.path, request), "reason": hide(one.reason)} for one in quarantined
        ]
        return JSONResponse({"object": "list", "data": [one.body(request) for one in seen], "quarantined": broken})

    async def show(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            seen = await self._call(lambda engine: _Seen.of(engine.store, name))
        except UnknownAdapter:
            raise _unknown(name, None) from None
        return JSONResponse(seen.body(request))

    async def add(self, request: Request) -> Response:
        """Registers an adapter, or replaces one; 201 or 200."""
        asked = AddAdapter.parse(await read_body(request, self._served.max_body_bytes))
        seen, replaced = await self._load(asked.name, asked.path, "name", "path", replace=True)
        return JSONResponse(seen.body(request), status_code=200 if replaced else 201)

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
        if self._num_loads >= MAX_LOADS:
            raise _busy(f"{MAX_LOADS} adapters are being loaded already")
        self._num_loads += 1
        try:
            return await self._load_one(name, path, name_field, path_field, replace=replace)
        finally:
            self._num_loads -= 1

    async def _load_one(
        self, name: str, path: str, name_field: str, path_field: str, *, replace: bool
    ) -> tuple[_Seen, bool]:
        directory = await self._beside(partial(self._roots.find, path, path_field))
        if not replace and await self._call(lambda engine: name in engine.store):
            raise _already_loaded(name, name_field)
        try:
            async with self._checking:
                manifest, image = await self._beside(partial(self._check, directory))
            seen, replaced = await self._call(lambda engine: _swap(engine, name, manifest, image, replace=replace))
        except AdapterFormatError as error:
            raise ApiError(400, str(error), param=path_field, code="invalid_adapter") from None
        except FileExistsError:
            raise _already_loaded(name, name_field) from None
        log.info("%s adapter %s: version %d from %s", "replaced" if replaced else "added", name,
                 seen.adapter.version, directory)  # fmt: skip
        report(name, manifest)
        return seen, replaced

    def _check(self, directory: Path) -> tuple[AdapterManifest, HostImage]:
        """The adapter that is to be swapped in, as it is on the disk at the end of the check, and its weights."""
        image = HostImage()
        manifest = self._worker.check_adapter(directory, self._roots.roots, image)
        with open_unchanged(manifest):
            return manifest, image

    async def _beside(self, function: Callable[[], T]) -> T:
        """Runs what asks the disk on a thread of its own, and waits no longer than a load may take."""
        try:
            future = self._threads.submit(function)
        except NoThreadLeft as error:
            raise _busy(str(error)) from None
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), self._load_seconds)
        except TimeoutError:
            raise ApiError(
                504,
                f"the disk did not answer within {self._load_seconds:g} seconds (adapter_load_seconds)",
                type="server_error",
                code="load_timed_out",
            ) from None

    async def _unload(self, name: str, field: str | None) -> None:
        self._roots.require()
        try:
            await self._call(lambda engine: engine.store.unregister(name))
        except UnknownAdapter:
            raise _unknown(name, field) from None
        log.info("removed adapter %s", name)

    async def _call(self, function: Any) -> Any:
        return await asyncio.wrap_future(self._worker.call(function))


def _swap(
    engine: Engine, name: str, manifest: AdapterManifest, image: HostImage, *, replace: bool
) -> tuple[_Seen, bool]:
    """Registers what was checked, on the engine's thread, with its weights. FileExistsError unless it may replace."""
    store = engine.store
    replaced = name in store
    if replaced and not replace:
        raise FileExistsError(name)
    store.register(name, manifest, image=image)
    engine.quarantine.pop(name, None)
    return _Seen.of(store, name), replaced


def shown_path(path: Path, request: Request) -> str:
    """A path as JSON can hold it: what is not UTF-8 or can't be printed is escaped.

    Who may not know where files lie sees it from below its root.
    """
    text = str(path) if request.state.sees_paths else request.app.state.private_paths.shown(path)
    return text if text.isprintable() else shown(text)


def _busy(why: str) -> ApiError:
    return ApiError(503, f"{why}; try again later", type="server_error", code="loads_busy")


def _already_loaded(name: str, field: str) -> ApiError:
    return ApiError(
        400,
        f"The lora adapter '{name}' has already been loaded. To replace it, set 'load_inplace' to true.",
        param=field,
        code="adapter_already_loaded",
    )


def _unknown(name: str, field: str | None) -> ApiError:
    return ApiError(404, f"The lora adapter '{name}' cannot be found.", param=field, code="adapter_not_found")
