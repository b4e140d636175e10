"""The catalog of an API server: it alone resolves adapter names, so no replica serves a stale version.

Tests: tests/server/cluster/test_registered_catalog.py
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ...core.quarantine import Quarantined
from ...core.requests.request_params import AdapterPaused, InvalidRequest, NotServed, UnknownModel
from ...memory.adapters.adapter import check_name
from ...memory.adapters.composed_names import ComposedNames
from ...memory.adapters.composition import Composition, InvalidComposition, read_composition
from ...memory.adapters.store import UnknownAdapter
from ...memory.adapters.versions import VersionNames, full_name, plain_of, split_version, versioned
from ...memory.files.composed import composed, paths_of
from ...memory.files.error import AdapterFormatError, LoadFailure
from ..engine.backend_adapters import AdapterTable, BackendAdapters, done, is_current
from ..engine.engine_view import AdapterState
from .in_flight_table import AND

if TYPE_CHECKING:
    from ...core.engine_stats import EngineStats
    from ...memory.files.manifest import AdapterManifest
    from ...memory.host.image import HostImage
    from .dispatcher import Dispatcher
    from .fleet import Fleet

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class CatalogEntry:
    """One version of a name."""

    name: str
    version: int
    """Its number within this API server."""
    manifest: AdapterManifest
    label: str = ""
    """The version that clients see."""
    pinned: bool = False
    """Replicas are to keep it resident."""
    sources: tuple[CatalogEntry, ...] = ()
    """The versions that it is composed of; empty: it has files of its own."""

    @property
    def versions(self) -> str:
        """Its version, or those that it is composed of."""
        return AND.join(full_name(each.name, each.label) for each in self.sources or (self,))


@dataclass(frozen=True, slots=True)
class Cluster:
    """The cluster, as far as the catalog needs it; for any thread."""

    dispatcher: Dispatcher
    soon: Callable[..., None]
    call: Callable[..., Future[Any]]
    """Have the dispatcher's loop call a function; `call` also waits for the result, or returns `otherwise` if the loop
    has ended.
    """
    learn: Callable[[CatalogEntry], Future[bool]]
    """Hash an entry in the background and record the hash; returns False in that case."""
    stats: Callable[[], EngineStats]

    @property
    def fleet(self) -> Fleet:
        return self.dispatcher.fleet

    def end_users(self, name: str) -> Future[int]:
        """End the requests of a name; return how many there were."""
        reason = f"adapter {name!r} was removed"
        return self.call(self.dispatcher.end_users, name, reason, LoadFailure.REMOVED, otherwise=0)


class Catalog(BackendAdapters):
    """The adapters of a cluster, by name, and its own `AdapterTable`."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__()
        self._cluster = cluster
        self._lock = threading.RLock()
        self._entries: VersionNames[CatalogEntry] = VersionNames()
        self._composed: ComposedNames[CatalogEntry] = ComposedNames()
        self._versions = itertools.count(1)
        self.paused: set[str] = set()
        self._pins: dict[str, Path] = {}
        self.quarantine: dict[str, Quarantined] = {}

    # --- the start, and requests ---

    def register(
        self,
        name: str,
        manifest: AdapterManifest,
        image: HostImage | None = None,
        *,
        label: str | None = None,
        keep: int | None = 1,
        pinned: bool | None = None,
    ) -> CatalogEntry:
        """Make a manifest the adapter of a name, for new requests. Raises AdapterFormatError for an invalid name.

        image: unused, because the replicas read the weights. label, keep: as in `AdapterStore.register`; a name may
        itself be a version's. pinned: None: unchanged.
        """
        check_name(name)
        plain = plain_of(name, label)
        with self._lock:
            number, label = next(self._versions), label or str(self._entries.last_number(name) + 1)
            before = self.get(name) if name in self._entries else None
            if pinned is None:
                pinned = before is not None and before.pinned
            if before is not None and before.pinned:  # a kept version is not pinned
                self._entries.put(name, replace(before, pinned=False), None)
            entry = CatalogEntry(plain, number, manifest, label, pinned)
            gone = self._entries.put(name, entry, keep)
            self.quarantine.pop(name, None)
            if pinned or (before is not None and before.pinned):
                self._tell_pins()
            for one in gone:
                self._left(one)
            if manifest.content_hash is not None:
                self._cluster.soon(self._cluster.dispatcher.revive, manifest.content_hash)
        return entry

    def unregister(self, name: str) -> CatalogEntry:
        with self._lock:
            entry = self.get(name)
            if name not in self._entries:
                raise UnknownAdapter(f"{name!r} is the newest version of {entry.name!r}; remove that")
            self._entries.pop(name)
            if entry.pinned:
                self._tell_pins()
            self._left(entry)
        return entry

    def _unregister_newest(self, entry: CatalogEntry) -> None:
        """Forget the newest version of a name; the name then means the latest kept one, if any."""
        self._entries.promote(entry.name)
        if entry.pinned:
            self._tell_pins()
        self._left(entry)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def registered(self) -> list[tuple[str, CatalogEntry]]:
        """Every version under its name, in any order; an earlier one under `name@version`."""
        with self._lock:
            return list(self._entries.items())

    @contextmanager
    def using(self, name: str, tenant: str = "") -> Iterator[CatalogEntry]:
        """The same, unchanged within the `with` block."""
        with self._lock:
            yield self.find(name, tenant)

    def find(self, name: str, tenant: str = "") -> CatalogEntry:
        """The current version of the adapter that a tenant requests, or of several. Raises InvalidRequest, like an
        engine.
        """
        try:
            composition = read_composition(name)
            return self._find_one(name) if composition is None else self._compose(name, composition, tenant)
        except (InvalidComposition, AdapterFormatError) as error:
            raise InvalidRequest("adapters", str(error)) from None

    def _compose(self, name: str, composition: Composition, tenant: str) -> CatalogEntry:
        """The entry of several adapters; it lasts until one of them leaves its name."""
        sources = tuple(self._find_one(part) for part, _ in composition.terms)
        known = self._composed.get(name)
        if known is not None and list(map(_identity, known.sources)) == list(map(_identity, sources)):
            self._composed.request(name, tenant, self._forget_composed)
            return known
        scales = (scale for _, scale in composition.terms)
        manifest = composed([(one.manifest, scale) for one, scale in zip(sources, scales, strict=True)])
        if known is not None:
            self._forget_composed(known)
        entry = CatalogEntry(name, next(self._versions), manifest, sources=sources)
        self._composed.put(name, entry)
        self._composed.request(name, tenant, self._forget_composed)
        if manifest.content_hash is not None:
            self._cluster.soon(self._cluster.dispatcher.revive, manifest.content_hash)
        return entry

    def _forget_composed(self, entry: CatalogEntry) -> None:
        self._composed.pop(entry.name)
        self._left(entry)

    def _find_one(self, name: str) -> CatalogEntry:
        if name not in self._entries and (aside := self.quarantine.get(name)) is not None:
            raise NotServed("model", f"adapter {name!r} is not served: {aside.reason}")
        if (entry := self._entries.latest(name)) is None:
            raise UnknownModel(name)
        if entry.name in self.paused:
            raise AdapterPaused(entry.name)
        return entry

    def get(self, name: str) -> CatalogEntry:
        """The version that a name means, paused or not. Raises UnknownAdapter."""
        entry = self._entries.find(name)
        if entry is None:
            raise UnknownAdapter(f"adapter {name!r} is not registered")
        return entry

    def version_of(self, name: str) -> CatalogEntry:
        return self._entries.latest(name) or self.get(name)

    def kept(self, name: str) -> list[str]:
        return self._entries.kept(name)

    def last_number(self, name: str) -> int:
        return self._entries.last_number(name)

    def has_version(self, name: str, label: str) -> bool:
        return self._entries.find(versioned(name, label)) is not None

    def note_content(self, entry: CatalogEntry, manifest: AdapterManifest, tenant: str) -> None:
        """Keep the content hash of the entry of a tenant's request, or of those that it is composed of."""
        if not entry.sources:
            self.note(entry.name, entry.version, manifest)
            return
        for source, (known, _) in zip(entry.sources, manifest.sources, strict=True):
            self.note(source.name, source.version, known)
        with suppress(InvalidRequest), self.using(entry.name, tenant):
            pass  # composes it again

    def learn(self, name: str, manifest: AdapterManifest) -> None:
        entry = replace(self.get(name), manifest=manifest)
        self._entries.put(name, entry, None)
        if entry.pinned:
            self._tell_pins()

    def stats(self) -> EngineStats:
        return self._cluster.stats()

    def names_of(self, content_hash: str) -> list[str]:
        with self._lock:
            entries = (*self._entries.values(), *self._composed.values())
            return [one.name for one in entries if one.manifest.content_hash == content_hash]

    # --- AdapterBook ---

    def _ask(self, function: Callable[[AdapterTable], T | Future[T]]) -> Future[T]:
        """Return a completed future, or the one that the function returns."""
        try:
            with self._lock:
                result = function(self)
        except (UnknownAdapter, FileExistsError, ValueError) as error:
            return failed(error)
        return result if isinstance(result, Future) else done(result)

    def num_requests(self, name: str) -> Future[int]:
        return self._cluster.call(lambda: len(self._cluster.dispatcher.users(name)), otherwise=0)

    def paths_in_use(self) -> Future[set[Path]]:
        def with_ours(theirs: Future[set[Path]]) -> None:
            result.set_result({path for one in theirs.result() for path in paths_of(one)} | ours)

        # a request either has its path among the others by now, or does not have a path that is missing here
        with self._lock:
            entries = (*self._entries.values(), *self._composed.values())
            ours = {path for one in entries for path in paths_of(one.manifest.path)}
            result: Future[set[Path]] = Future()
            self._cluster.call(self._cluster.dispatcher.paths, otherwise=set()).add_done_callback(with_ours)
        return result

    def remove(self, name: str, *, force: bool) -> Future[tuple[AdapterState, int]]:
        def remove(_: AdapterTable) -> tuple[AdapterState, int] | Future[tuple[AdapterState, int]]:
            entry = self.get(name)
            state = self.state_of(entry.name, entry)
            if name not in self._entries:
                self._unregister_newest(entry)
            else:
                for each in [*self._entries.kept(name), name]:
                    self.unregister(each)
            if entry.name not in self._entries and not self.kept(entry.name):
                self.paused.discard(entry.name)
            if not force:
                return state, 0
            result: Future[tuple[AdapterState, int]] = Future()
            ended = self._cluster.end_users(name)
            ended.add_done_callback(lambda ended: result.set_result((state, ended.result())))
            return result

        return self._ask(remove)

    def pin(self, name: str) -> Future[bool]:
        """True once all replicas keep it resident; False: try again. If one can't, all replicas unpin it."""

        def pin(_: AdapterTable) -> bool | Future[bool]:
            entry = self.get(name)
            content = entry.manifest.content_hash
            if content is None:
                return self._cluster.learn(entry)
            if not entry.pinned:
                return self._set_pinned(entry, pinned=True)
            if (error := self._cluster.fleet.pin_failure(content)) is None:
                return self._cluster.fleet.is_pinned(content)
            self._set_pinned(entry, pinned=False)
            raise InvalidRequest("pin", str(error)) if error.failure is LoadFailure.NO_ROOM else error

        return self._ask(pin)

    def unpin(self, name: str) -> Future[Any]:
        return self._ask(lambda _: self._set_pinned(self.get(name), pinned=False))

    def overflowing(self) -> Future[list[AdapterState]]:
        contents = self._cluster.fleet.overflowing()
        found = [each for each in self.registered() if each[1].manifest.content_hash in contents] if contents else []
        return done([self.state_of(*each) for each in found])

    def set_aside(self, one: Quarantined, version: int, *, in_use: bool) -> Future[bool]:
        with self._lock:
            if is_current(self, one.name, version):
                self.unregister(one.name)
                self.quarantine[one.name] = one
        return done(True)

    # --- common ---

    def _set_pinned(self, entry: CatalogEntry, *, pinned: bool) -> Future[bool]:
        """Pin or unpin a version, unless it has been replaced; False: the result is not known yet."""
        with self._lock:
            if self._entries.find(name := self.name_of(entry)) == entry:
                self._entries.put(name, replace(entry, pinned=pinned), None)
                self._tell_pins()
        return done(False)

    def name_of(self, entry: CatalogEntry) -> str:
        """The name under which a version is registered: its own, or `name@version`."""
        newest = self._entries.find(entry.name)
        return entry.name if newest is not None and newest.version == entry.version else entry.versions

    def _tell_pins(self) -> None:
        pinned = [one.manifest for one in self._entries.values() if one.pinned]
        pins = {one.content_hash: one.path for one in pinned if one.content_hash is not None}
        if pins != self._pins:
            self._pins = pins
            self._cluster.soon(self._cluster.fleet.pin, pins)

    def _left(self, entry: CatalogEntry) -> None:
        """A version has lost its name; its content may still belong to another."""
        versions = {entry.version}
        for other in [one for one in self._composed.values() if versions & {each.version for each in one.sources}]:
            self._forget_composed(other)
        content = entry.manifest.content_hash
        if content is not None and not self.names_of(content):
            self._cluster.soon(self._cluster.dispatcher.retire, content)

    def state_of(self, name: str, entry: CatalogEntry) -> AdapterState:
        content = entry.manifest.content_hash
        pinned = entry.pinned and self._cluster.fleet.is_pinned(content)
        paused = split_version(name)[0] in self.paused or name in self.paused
        return AdapterState(
            name,
            version=entry.version,
            manifest=entry.manifest,
            tier=self._cluster.fleet.tier_of(content),
            pages=0,
            references=0,
            pinned=pinned,
            label=entry.label,
            paused=paused,
        )


def _identity(entry: CatalogEntry) -> tuple[int, str | None]:
    return entry.version, entry.manifest.content_hash


def failed(error: Exception) -> Future:
    """A future that has failed with an error."""
    future: Future = Future()
    future.set_exception(error)
    return future
