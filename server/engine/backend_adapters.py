"""Interface of a backend's adapter registry: adapters by name, for requests, operators and the health checker.

Tests: tests/server/engine/test_many_adapters.py
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from ...memory.adapters.store import UnknownAdapter
from ...memory.adapters.versions import plain_of, versioned
from .engine_view import AdapterListing, AdapterState
from .loaded_names import LoadedNames

if TYPE_CHECKING:
    from ...core.engine_stats import EngineStats
    from ...core.quarantine import Quarantined
    from ...memory.adapters.registry_store import Entry
    from ...memory.files.manifest import AdapterManifest
    from ...memory.host.image import HostImage

T = TypeVar("T")


class RegistryNames(NamedTuple):
    """The entries of a cluster's registry."""

    identity: str
    entries: list[Entry]
    retired: list[Entry]
    """Entries that lost their names since the last call."""


class NamedVersion(Protocol):
    """A version of an adapter: its number, unlike that of any other, and its manifest."""

    @property
    def version(self) -> int: ...
    @property
    def manifest(self) -> AdapterManifest: ...


class AdapterTable(Protocol):
    """The table of names of an engine or API server. A version has a name, a `version`, a label, a manifest."""

    quarantine: dict[str, Quarantined]
    """Adapters that are not served, by name."""
    paused: set[str]
    """Names of adapters whose versions all refuse new requests."""

    def __contains__(self, name: str, /) -> bool: ...
    def get(self, name: str, /) -> Any:
        """The version that a name means. Raises UnknownAdapter."""
        ...

    def kept(self, name: str, /) -> list[str]:
        """`name@version` of the earlier versions that are registered, oldest first."""
        ...

    def registered(self) -> list[tuple[str, Any]]:
        """Every registered version under its name, in any order."""
        ...

    def register(
        self,
        name: str,
        manifest: AdapterManifest,
        image: HostImage | None,
        *,
        label: str | None = None,
        keep: int | None = 1,
    ) -> object:
        """Make a manifest the adapter of a name, out of quarantine, and pinned if the previous version is. label, keep:
        as in `AdapterStore.register`.
        """
        ...

    def has_version(self, name: str, label: str) -> bool: ...
    def last_number(self, name: str, /) -> int: ...
    def learn(self, name: str, manifest: AdapterManifest) -> None:
        """Keep findings about the version that a name means."""
        ...

    def state_of(self, name: str, version: Any, /) -> AdapterState: ...
    def stats(self) -> EngineStats: ...


class BackendAdapters(ABC):
    """Adapters by name. Any thread may call methods; they raise UnknownAdapter for an unregistered name."""

    as_base: str | None = None
    """The adapter that serves requests for the base model's name, whether it is registered or not; None: the base model
    itself.
    """

    def __init__(self) -> None:
        self.loaded_names = LoadedNames()
        """What clients have loaded over HTTP, also by other API servers; `AdapterApi` adds the loads of this one."""

    def registry(self) -> Future[RegistryNames | None]:
        """The names of a cluster's registry; None if this process keeps them."""
        return done(None)

    @abstractmethod
    def _ask(self, function: Callable[[AdapterTable], T]) -> Future[T]:
        """Call a function with the table of names, which nothing else accesses meanwhile."""

    def listing(self) -> Future[AdapterListing]:
        def listing(names: AdapterTable) -> AdapterListing:
            states = partial(_states, names, names.registered())
            return AdapterListing(states, list(names.quarantine.values()), names.stats())

        return self._ask(listing)

    def names(self) -> Future[list[str]]:
        """Names of all registered versions, in any order."""
        return self._ask(lambda names: [name for name, _ in names.registered()])

    def state(self, name: str) -> Future[AdapterState]:
        """The state of a version; of the latest one if the name has none of its own."""

        def state(names: AdapterTable) -> AdapterState:
            found = _latest_name(names, name)
            return names.state_of(found, names.get(found))

        return self._ask(state)

    def is_registered(self, name: str) -> Future[bool]:
        """True if a name, or `name@version`, has a version of its own."""

        def is_registered(names: AdapterTable) -> bool:
            try:
                names.get(name)
            except UnknownAdapter:
                return False
            return True

        return self._ask(is_registered)

    @abstractmethod
    def version_of(self, name: str) -> NamedVersion:
        """The version that a request for a name uses now; no step has to wait for it, nor does it wait for one."""

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
        """Register an adapter that `check_adapter` checked; tells whether it replaced another. Once the future has
        completed, no request for the newest version begins with the old one. Raises FileExistsError unless it may
        `replace`, and for an existing version. name, label, keep: as in `AdapterStore.register`.
        """

        def put(names: AdapterTable) -> tuple[AdapterState, bool]:
            replaced, plain = name in names, plain_of(name, label)
            if replaced and (plain != name or not replace):
                raise FileExistsError(name)
            if label and names.has_version(plain, label):
                raise FileExistsError(versioned(plain, label))
            names.register(name, manifest, image, label=label, keep=keep)
            return names.state_of(name, names.get(name)), replaced

        return self._ask(put)

    def is_version(self, name: str) -> Future[bool]:
        """True for `name@version` of the newest or of a kept version."""
        return self._ask(lambda names: not names.kept(name) and names.get(name).name != name)

    def versions(self, name: str) -> Future[list[AdapterState]]:
        """The newest version of a name and the kept ones; empty for a name that is not registered."""

        def versions(names: AdapterTable) -> list[AdapterState]:
            found = [*([name] if name in names else ()), *names.kept(name)]
            return [names.state_of(each, names.get(each)) for each in found]

        return self._ask(versions)

    def pause(self, name: str, *, paused: bool) -> Future[None]:
        """Refuse new requests for all versions of a name, with AdapterPaused, or accept them again."""

        def pause(names: AdapterTable) -> None:
            names.get(_latest_name(names, name))
            (names.paused.add if paused else names.paused.discard)(name)

        return self._ask(pause)

    @abstractmethod
    def num_requests(self, name: str) -> Future[int]:
        """Requests in progress of all versions of a name, including retired ones."""

    @abstractmethod
    def paths_in_use(self) -> Future[set[Path]]:
        """Directories of all versions that are registered, or that requests still use."""

    def newest_number(self, name: str) -> Future[int]:
        """The highest version number that a name has had."""
        return self._ask(lambda names: names.last_number(name))

    @abstractmethod
    def remove(self, name: str, *, force: bool) -> Future[tuple[AdapterState, int]]:
        """Forget an adapter and its kept versions, or one version: if a name's newest version is removed, the name then
        means the latest kept one. Returns its state, and how many requests were cancelled: none unless `force`.
        """

    @abstractmethod
    def pin(self, name: str) -> Future[bool]:
        """Keep an adapter resident. False while it is being read: try again."""

    @abstractmethod
    def unpin(self, name: str) -> Future[Any]: ...

    # --- for the health checker ---

    def unhashed(self) -> Future[list[AdapterState]]:
        """Adapters without a known content hash, or whose weights were not checked for an effect."""
        return self._ask(
            lambda names: _states(names, [one for one in names.registered() if _is_unchecked(one[1].manifest)])
        )

    def quarantined(self) -> Future[list[Quarantined]]:
        """Adapters that are not served because they are broken."""
        return self._ask(lambda names: list(names.quarantine.values()))

    def note(self, name: str, version: int, manifest: AdapterManifest) -> Future[bool]:
        """Keep findings about a version; False if it is no longer the current one."""

        def note(names: AdapterTable) -> bool:
            if not is_current(names, name, version):
                return False
            names.learn(name, manifest)
            return True

        return self._ask(note)

    @abstractmethod
    def overflowing(self) -> Future[list[AdapterState]]:
        """Adapters to quarantine: enough of their requests have run, and none had finite logits."""

    @abstractmethod
    def set_aside(self, one: Quarantined, version: int, *, in_use: bool) -> Future[bool]:
        """Quarantine an adapter, unless it was replaced meanwhile; False to try again later. in_use: also one that has
        been loaded; otherwise a loaded adapter has proved to be intact.
        """

    def keep_aside(self, one: Quarantined) -> Future[None]:
        """Keep an adapter quarantined, with another reason, unless it was replaced meanwhile."""

        def keep(names: AdapterTable) -> None:
            if one.name in names.quarantine:
                names.quarantine[one.name] = one

        return self._ask(keep)

    def release(self, name: str, manifest: AdapterManifest, image: HostImage | None) -> Future[bool]:
        """Release an adapter from quarantine; False if it was removed or replaced meanwhile."""

        def release(names: AdapterTable) -> bool:
            if name not in names.quarantine or name in names:
                return False
            names.register(name, manifest, image)
            return True

        return self._ask(release)


def done(result: T) -> Future[T]:
    """A completed future."""
    future: Future[T] = Future()
    future.set_result(result)
    return future


def is_current(names: AdapterTable, name: str, version: int) -> bool:
    """True if a name means the version with this number."""
    return name in names and names.get(name).version == version


def _latest_name(names: AdapterTable, name: str) -> str:
    """The name, or that of its latest kept version if it has no version of its own."""
    kept = names.kept(name) if name not in names else ()
    return kept[-1] if kept else name


def _states(names: AdapterTable, registered: Iterable[tuple[str, Any]]) -> list[AdapterState]:
    return [names.state_of(*each) for each in sorted(registered, key=itemgetter(0))]


def _is_unchecked(manifest: AdapterManifest) -> bool:
    return manifest.content_hash is None or manifest.no_effect is None
