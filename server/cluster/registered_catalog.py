"""The catalog of one of several API servers; the registry owns its names.

A change is made in the registry, and in every API server, including this one, when the registry announces it. Adapters
that an API server has registered from its directories at the start are its own until a client changes them. A kept
version is a separate entry there, named `name@version`.
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
from ...memory.adapters.publishing import LabelTaken
from ...memory.adapters.registry_store import Entry as Registered
from ...memory.adapters.store import UnknownAdapter
from ...memory.adapters.versions import plain_of, versioned
from ...memory.files.error import AdapterFormatError
from ..engine.backend_adapters import RegistryNames, done
from ..engine.engine_view import AdapterState
from .address import Address
from .catalog import Catalog, CatalogEntry, Cluster, failed
from .registry import EXISTS, TAKEN, UNKNOWN
from .registry_client import RegistryClient, RegistryRefusal

if TYPE_CHECKING:
    from ...memory.files.manifest import AdapterManifest
    from ...memory.host.image import HostImage

log = logging.getLogger(__name__)

T = TypeVar("T")
START = "0"
"""Version of an adapter registered at the start; the registry's begin with 1."""

Check = Callable[[Path], "AdapterManifest"]
"""Reads an adapter, hashes it and has the replicas load it; this may take long. Raises AdapterFormatError."""


class RegisteredCatalog(Catalog):
    """A catalog whose `put` and `remove` complete when every API server knows; they raise RegistryAway while the
    registry is away.
    """

    def __init__(self, cluster: Cluster, check: Check, is_sourced: Callable[[str], bool] = lambda name: False) -> None:
        """check: for adapters that other API servers have registered. is_sourced: whether requests for a name may have
        loaded it, rather than a client.
        """
        super().__init__(cluster)
        self._is_sourced = is_sourced
        self._check = check
        self._checked: dict[str, AdapterManifest] = {}  # this API server's own writes, by content hash
        self._client: RegistryClient | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def follow(self, address: Address, secret: bytes) -> RegistryClient:
        """Follow a registry on the running loop; returns the client, whose first copy the caller should await."""
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
    ) -> CatalogEntry:
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
        if not replace and name in self and not (label and self.has_version(plain_of(name, label), label)):
            return failed(FileExistsError(name))
        return self._soon(self._put_version(name, manifest, replace=replace, label=label, keep=keep))

    def registry(self) -> Future[RegistryNames | None]:
        async def registry() -> RegistryNames | None:
            copy = self._known_client.copy
            return RegistryNames(copy.identity or "", list(copy.entries.values()), copy.take_retired())

        return self._soon(registry())

    def pause(self, name: str, *, paused: bool) -> Future[None]:
        return self._soon(self._pause(name, paused=paused))

    def remove(self, name: str, *, force: bool) -> Future[tuple[AdapterState, int]]:
        return self._soon(self._remove(name, force=force))

    async def adopt(self, name: str, now: Registered | None) -> None:
        """Apply a change that the registry has sent. No request begins with the name's old content from then on."""
        if now is None:
            self._forget(name)
            return
        if name == now.plain_name or now.plain_name not in self:
            (self.paused.add if now.paused else self.paused.discard)(now.plain_name)
        before = self.get(name) if name in self else None
        path, content = Path(now.path), now.content_hash
        if before is not None and (before.manifest.path, before.manifest.content_hash, before.label) == (
            path,
            content,
            now.label,
        ):
            if before.pinned != now.pinned:
                super()._set_pinned(before, pinned=now.pinned)
            return
        try:
            manifest = self._checked.get(content) or self._known(path, content)
            if manifest is None:
                manifest = await asyncio.get_running_loop().run_in_executor(None, self._check, path)
            if manifest.content_hash != content:
                raise AdapterFormatError(f"{now.path}: the files have changed since in the cluster")
            self.register(name, manifest, label=now.label, pinned=now.pinned)
            if not self._is_sourced(name):
                self.loaded_names.add(now.plain_name, now.label)
        except Exception as error:  # for any error: the old content must not be served under this name
            log.warning("adapter %s of the cluster can't be served by this API server: %s", name, error)
            if name in self:
                self.unregister(name)
            self.quarantine[name] = Quarantined(name, path, str(error))

    def _forget(self, name: str) -> None:
        self.quarantine.pop(name, None)
        plain = self.unregister(name).name if name in self else name
        if plain not in self and not self.kept(plain):
            self.paused.discard(plain)
            self.loaded_names.discard(plain)

    def _known(self, path: Path, content: str) -> AdapterManifest | None:
        """The manifest of a version that this API server serves: its directory may hold other files by now."""
        served = (one.manifest for _, one in self.registered())
        return next((one for one in served if one.content_hash == content and one.path == path), None)

    async def _put_version(
        self, name: str, manifest: AdapterManifest, *, replace: bool, label: str | None, keep: int | None
    ) -> tuple[AdapterState, bool]:
        """Have the registry make the newest version, keep earlier ones, and forget the oldest."""
        before, plain = None, plain_of(name, label)
        # registered at the start: the registry does not have it
        if plain in self and plain not in self._known_client.copy.entries:
            newest = self.get(plain)
            before = self._registered(plain, await self._hashed(newest.manifest), newest.label, pinned=newest.pinned)
        entry = self._registered(name, manifest, label or "")
        self._checked[entry.content_hash] = manifest
        try:
            label, existed = await self._known_client.load(
                entry, replace=replace, keep=keep, before=before, last_number=self.last_number(plain)
            )
        except RegistryRefusal as refusal:
            raise _exists(refusal, name) from None
        finally:
            self._checked.pop(entry.content_hash, None)
        newest = self.state(name).result()
        return newest if newest.label == label else self.state(versioned(name, label)).result(), existed

    def _registered(self, name: str, manifest: AdapterManifest, label: str, *, pinned: bool = False) -> Registered:
        """An entry for the registry. Raises AdapterFormatError without a content hash."""
        if manifest.content_hash is None:
            raise AdapterFormatError(
                f"{manifest.path}: its content hash is not known, so the cluster can't identify it"
            )
        return Registered.of(name, manifest, label, pinned=pinned, paused=name in self.paused)

    def _set_pinned(self, entry: CatalogEntry, *, pinned: bool) -> Future[bool]:
        if entry.pinned == pinned:
            return done(False)
        return self._soon(self._write_pinned(entry, pinned))

    async def _write_pinned(self, entry: CatalogEntry, pinned: bool) -> bool:
        await self._put(self.name_of(entry), await self._hashed(entry.manifest), label=entry.label, pinned=pinned)
        return False

    async def _put(
        self,
        name: str,
        manifest: AdapterManifest,
        *,
        label: str,
        paused: bool | None = None,
        pinned: bool | None = None,
    ) -> None:
        """Write an entry of the registry again. paused, pinned: None: unchanged."""
        pinned = self.get(name).pinned if pinned is None else pinned
        entry = self._registered(name, manifest, label, pinned=pinned)
        if paused is None and (known := self._known_client.copy.entries.get(name)) is not None:
            paused = known.paused
        if paused is not None:
            entry = entry._replace(paused=paused)
        self._checked[entry.content_hash] = manifest
        try:
            await self._known_client.put(entry)
        finally:
            self._checked.pop(entry.content_hash, None)

    async def _pause(self, name: str, *, paused: bool) -> None:
        for each in [name] if name in self else self.kept(name) or [name]:  # of a name with labels alone, all
            entry = self.get(each)
            await self._put(each, await self._hashed(entry.manifest), label=entry.label, paused=paused)

    async def _remove(self, name: str, *, force: bool) -> tuple[AdapterState, int]:
        client, entry = self._known_client, self.get(name)
        state = self.state_of(name, entry)
        try:
            # registered at the start: other API servers have it, too, and must learn of the change
            if (own := self.name_of(entry)) not in client.copy.entries:
                await self._put(own, await self._hashed(entry.manifest), label=entry.label)
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
        assert self._client is not None, "the registry is followed before the API server serves"
        return self._client

    def _soon(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Run on the loop; from any thread."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


def _exists(refusal: RegistryRefusal, name: str) -> Exception:
    """Convert a refusal to load to an error of `BackendAdapters.put`."""
    kinds = {EXISTS: FileExistsError(name), TAKEN: LabelTaken(refusal.message)}
    return kinds.get(refusal.reason, refusal)
