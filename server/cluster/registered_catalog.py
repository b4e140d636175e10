"""The catalog of one of several fronts: its names are the registry's.

A change is made at the registry, and here, as in every other front, once it tells of it. What a front has registered
from its directories at the start is its own until a client changes it. A kept version is an entry of its own there,
named `name@version`.
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
from ...memory.adapters.registry_store import Entry as Registered
from ...memory.adapters.store import UnknownAdapter
from ...memory.adapters.versions import versioned
from ...memory.files.error import AdapterFormatError
from ..engine.engine_view import AdapterState
from .address import Address
from .catalog import Catalog, Cluster, Entry, done, failed
from .registry import EXISTS, UNKNOWN
from .registry_client import RegistryClient, RegistryRefusal

if TYPE_CHECKING:
    from ...memory.files.format import AdapterManifest
    from ...memory.host.image import HostImage

log = logging.getLogger(__name__)

T = TypeVar("T")
START = "0"
"""Version of an adapter of the start: the registry's are its generations, which begin with 1."""

Check = Callable[[Path], "AdapterManifest"]
"""Reads an adapter, hashes it and has the replicas load it; it may take long. Raises AdapterFormatError."""


class RegisteredCatalog(Catalog):
    """A catalog; its `put` and `remove` are done when every front knows; RegistryAway while the registry is away."""

    has_registry = True

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

    def register(
        self,
        name: str,
        manifest: AdapterManifest,
        image: HostImage | None = None,
        *,
        label: str | None = None,
        keep: int | None = None,
        pinned: bool | None = None,
    ) -> Entry:
        return super().register(name, manifest, image, label=label or START, keep=None, pinned=pinned)

    def put(
        self,
        name: str,
        manifest: AdapterManifest,
        image: HostImage | None,
        *,
        replace: bool,
        label: str | None = None,
        keep: int | None = 1,
    ) -> Future[tuple[AdapterState, bool]]:
        if not replace and name in self:
            return failed(FileExistsError(name))
        if label and self.has_version(name, label):
            return failed(FileExistsError(versioned(name, label)))
        return self._soon(self._put_version(name, manifest, replace=replace, label=label, keep=keep or 1))

    def pause(self, name: str, *, paused: bool) -> Future[None]:
        return self._soon(self._pause(name, paused=paused))

    def remove(self, name: str, *, force: bool) -> Future[tuple[AdapterState, int]]:
        return self._soon(self._remove(name, force=force))

    async def adopt(self, name: str, now: Registered | None) -> None:
        """Act on a change that the registry has sent. No request begins with the name's old content from then on."""
        (self.paused.add if now is not None and now.paused else self.paused.discard)(name)
        if now is None:
            self.quarantine.pop(name, None)
            if name in self:
                self.unregister(name)
            return
        before = self.get(name) if name in self else None
        is_same = before is not None and (before.manifest.content_hash, before.label) == (now.content_hash, now.label)
        if before is not None and is_same and before.pinned != now.pinned:
            super()._set_pinned(before, pinned=now.pinned)
            return
        try:
            manifest = self._checked.get(now.content_hash)
            if manifest is None:
                manifest = await asyncio.get_running_loop().run_in_executor(None, self._check, Path(now.path))
            if manifest.content_hash != now.content_hash:
                raise AdapterFormatError(f"{now.path}: the files have changed since in the cluster")
            self.register(name, manifest, label=now.label, pinned=now.pinned)
        except Exception as error:  # whatever it is: the old content must not be served under this name
            log.warning("adapter %s of the cluster can't be served by this front: %s", name, error)
            if name in self:
                self.unregister(name)
            self.quarantine[name] = Quarantined(name, Path(now.path), str(error))

    async def _put_version(
        self, name: str, manifest: AdapterManifest, *, replace: bool, label: str | None, keep: int
    ) -> tuple[AdapterState, bool]:
        """Keep the newest version under a name of its own, put another in its place, and forget the oldest ones."""
        if keep > 1 and replace and name in self:
            before = self.get(name)
            await self._put(versioned(name, before.label), await self._hashed(before.manifest), label=before.label)
        made = await self._put(name, manifest, replace=replace, label=label or "")
        kept = self._entries.kept(name)
        for alias in kept[: max(0, len(kept) + 1 - keep)]:
            await self._known_client.remove(alias)
        return made

    def _set_pinned(self, entry: Entry, *, pinned: bool) -> Future[bool]:
        if entry.pinned == pinned:
            return done(False)
        return self._soon(self._write_pinned(entry, pinned))

    async def _write_pinned(self, entry: Entry, pinned: bool) -> bool:
        await self._put(entry.name, await self._hashed(entry.manifest), label=entry.label, pinned=pinned)
        return False

    async def _put(
        self,
        name: str,
        manifest: AdapterManifest,
        *,
        replace: bool = True,
        label: str = "",
        paused: bool | None = None,
        pinned: bool | None = None,
    ) -> tuple[AdapterState, bool]:
        """Write an entry of the registry. paused, pinned: None: as it is."""
        content = manifest.content_hash
        if content is None:
            raise AdapterFormatError(f"{manifest.path}: its content is not known, so the cluster can't tell it apart")
        existed = name in self
        self._checked[content] = manifest
        try:
            if paused is None:
                paused = name in self.paused
            if pinned is None:
                pinned = existed and self.get(name).pinned
            path = str(manifest.path.absolute())
            entry = Registered(name, content, path, 0, manifest.rank, manifest.file_size, pinned, label, paused)
            await self._known_client.put(entry, replace=replace)
        except RegistryRefusal as refusal:
            if refusal.reason != EXISTS:
                raise
            raise FileExistsError(name) from None
        finally:
            self._checked.pop(content, None)
        return self.state(name).result(), existed

    async def _pause(self, name: str, *, paused: bool) -> None:
        entry = self.get(name)
        await self._put(name, await self._hashed(entry.manifest), label=entry.label, paused=paused)

    async def _remove(self, name: str, *, force: bool) -> tuple[AdapterState, int]:
        client, entry = self._known_client, self.get(name)
        state = self.state_of(name, entry)
        try:
            if name not in client.copy.entries:  # of the start: other fronts have it, too, and must learn of this
                await self._put(name, await self._hashed(entry.manifest), label=entry.label)
            for each in [*self.kept(name), name]:
                await client.remove(each)
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
