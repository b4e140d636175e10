"""The catalog of one of several fronts: its names are the registry's.

A change is made at the registry, and here, as in every other front, once it tells of it. What a front has registered
from its directories at the start is its own until a client changes it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.quarantine import Quarantined
from ...memory.adapters.store import UnknownAdapter
from ...memory.files.error import AdapterFormatError
from ..engine.backend import AdapterState
from .address import Address
from .catalog import Catalog, Cluster, done, failed
from .catalog import Entry as Known
from .registry import EXISTS, UNKNOWN
from .registry_client import RegistryClient, RegistryRefusal
from .registry_store import Entry

if TYPE_CHECKING:
    from ...memory.files.format import AdapterManifest
    from ...memory.host.image import HostImage

log = logging.getLogger(__name__)

T = TypeVar("T")
Check = Callable[[Path], "AdapterManifest"]
"""Reads an adapter, hashes it and has the replicas load it; it may take long. Raises AdapterFormatError."""


class RegisteredCatalog(Catalog):
    """A catalog; its `put` and `remove` are done when every front knows; RegistryAway while the registry is away."""

    def __init__(self, cluster: Cluster, check: Check) -> None:
        """check: for adapters that other fronts have registered."""
        super().__init__(cluster)
        self._check = check
        self._checked: dict[str, AdapterManifest] = {}  # of this front's own writes, by content hash
        self._client: RegistryClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def follow(self, address: Address, secret: bytes) -> RegistryClient:
        """Begin to follow a registry, on the running loop; the client, of which a copy is to be waited for."""
        self._loop = asyncio.get_running_loop()
        self._client = client = RegistryClient(address, secret, self.adopt)
        client.start()
        return client

    def put(
        self, name: str, manifest: AdapterManifest, image: HostImage | None, *, replace: bool
    ) -> Future[tuple[AdapterState, bool]]:
        if not replace and name in self:
            return failed(FileExistsError(name))
        return self._soon(self._put(name, manifest, replace=replace))

    def remove(self, name: str, *, force: bool) -> Future[tuple[AdapterState, int]]:
        state = self.state(name)
        if state.exception() is not None:
            return failed(UnknownAdapter(f"adapter {name!r} is not registered"))
        return self._soon(self._remove(name, state.result(), force=force))

    async def adopt(self, name: str, now: Entry | None) -> None:
        """Act on a change that the registry has sent. No request begins with the name's old content from then on."""
        if now is None:
            self.quarantine.pop(name, None)
            if name in self:
                self.unregister(name)
            return
        before = self._entries.get(name)
        if before is not None and before.manifest.content_hash == now.content_hash and before.pinned != now.pinned:
            super()._set_pinned(before, pinned=now.pinned)
            return
        try:
            manifest = self._checked.get(now.content_hash)
            if manifest is None:
                manifest = await asyncio.get_running_loop().run_in_executor(None, self._check, Path(now.path))
            if manifest.content_hash != now.content_hash:
                raise AdapterFormatError(f"{now.path}: the files are not those that were registered in the cluster")
            self.register(name, manifest, pinned=now.pinned)
        except Exception as error:  # whatever it is: the old content must not be served under this name
            log.warning("adapter %s of the cluster can't be served by this front: %s", name, error)
            if name in self:
                self.unregister(name)
            self.quarantine[name] = Quarantined(name, Path(now.path), str(error))

    def _set_pinned(self, entry: Known, *, pinned: bool) -> Future[bool]:
        if entry.pinned == pinned:
            return done(False)
        return self._soon(self._write_pinned(entry, pinned))

    async def _write_pinned(self, entry: Known, pinned: bool) -> bool:
        manifest = await self._hashed(entry.manifest)
        await self._known_client.put(_entry(entry.name, manifest, pinned=pinned), replace=True)
        return False

    async def _put(self, name: str, manifest: AdapterManifest, *, replace: bool) -> tuple[AdapterState, bool]:
        content = manifest.content_hash
        if content is None:
            raise AdapterFormatError(f"{manifest.path}: its content is not known, so the cluster can't tell it apart")
        existed = name in self
        self._checked[content] = manifest
        try:
            pinned = existed and self._entries[name].pinned
            await self._known_client.put(_entry(name, manifest, pinned=pinned), replace=replace)
        except RegistryRefusal as refusal:
            if refusal.reason != EXISTS:
                raise
            raise FileExistsError(name) from None
        finally:
            self._checked.pop(content, None)
        return self.state(name).result(), existed

    async def _remove(self, name: str, state: AdapterState, *, force: bool) -> tuple[AdapterState, int]:
        client = self._known_client
        try:
            if name not in client.copy.entries:  # of the start: other fronts have it, too, and must learn of this
                await self._put(name, await self._hashed(state.manifest), replace=True)
            await client.remove(name)
        except RegistryRefusal as refusal:
            if refusal.reason != UNKNOWN:
                raise
            raise UnknownAdapter(f"adapter {name!r} is not registered") from None
        return state, await asyncio.wrap_future(self._cluster.end_users(name)) if force else 0

    async def _hashed(self, manifest: AdapterManifest) -> AdapterManifest:
        if manifest.content_hash is not None:
            return manifest
        return await asyncio.get_running_loop().run_in_executor(None, partial(self._check, manifest.path))

    @property
    def _known_client(self) -> RegistryClient:
        assert self._client is not None, "the registry is followed before the front serves"
        return self._client

    def _soon(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run on the loop; from any thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _entry(name: str, manifest: AdapterManifest, *, pinned: bool) -> Entry:
    """What the registry is told; the manifest has its content's hash."""
    path = str(manifest.path.absolute())
    return Entry(name, manifest.content_hash or "", path, 0, manifest.rank, manifest.file_size, pinned)
