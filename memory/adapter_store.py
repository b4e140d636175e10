"""The adapter store: which adapters exist, where their bytes are, who is using them.

An adapter name points at its current version; requests hold a version, so a reload never changes what a running
request computes with. Idle resident adapters stay in the pool until their pages are wanted, least recently used first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

from .adapter_format import AdapterFormatError, AdapterManifest
from .layout import SlabLayout
from .pages import OutOfPages, PageKind, PagePool


class Tier(StrEnum):
    """Where an adapter's bytes are."""

    DISK = "disk"
    DEVICE = "device"


class UnknownAdapter(KeyError):
    """No adapter is registered under the name."""

    def __str__(self) -> str:
        return str(self.args[0])


class AdapterBackend(Protocol):
    """How adapter bytes are read and moved; the executor brings it, so the store never touches a tensor."""

    def inspect(self, path: Path) -> AdapterManifest: ...
    def slabs(self, manifest: AdapterManifest) -> SlabLayout: ...
    def num_slabs(self, manifest: AdapterManifest) -> int: ...
    def read(self, manifest: AdapterManifest, slabs: SlabLayout) -> Any: ...
    def place(self, image: Any, pages: list[int]) -> None: ...


class Adapter:
    """One version of one adapter. `pages` is empty unless it is resident."""

    __slots__ = ("__weakref__", "last_used", "manifest", "name", "num_pages", "pages", "references", "slabs", "version")

    def __init__(self, name: str, version: int, manifest: AdapterManifest, slabs: SlabLayout, num_pages: int) -> None:
        self.name = name
        self.version = version
        self.manifest = manifest
        self.slabs = slabs
        self.num_pages = num_pages
        self.pages: list[int] = []
        self.references = 0
        self.last_used = 0

    @property
    def tier(self) -> Tier:
        return Tier.DEVICE if self.pages else Tier.DISK

    @property
    def rank(self) -> int:
        return self.manifest.rank

    def __repr__(self) -> str:
        return f"Adapter({self.name!r} v{self.version}, r={self.rank}, {self.tier.value}, refs={self.references})"


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A snapshot of an adapter for the outside."""

    name: str
    version: int
    rank: int
    target_modules: tuple[str, ...]
    path: Path
    tier: str
    references: int
    num_pages: int


class AdapterStore:
    """Registers, loads, pins and evicts adapters; its pages come from the pool that the KV cache uses."""

    def __init__(self, pool: PagePool, backend: AdapterBackend) -> None:
        self._pool = pool
        self._backend = backend
        self._current: dict[str, Adapter] = {}
        self._retired: list[Adapter] = []  # replaced or removed versions that requests still hold
        self._versions = itertools.count(1)
        self._clock = itertools.count(1)
        self.num_loads = 0
        self.num_evictions = 0

    # -- registry

    def register(self, name: str, path: Path) -> Adapter:
        """Make `path` the adapter `name`, replacing an earlier version for requests to come.

        Raises AdapterFormatError and keeps the earlier version when the directory does not hold a servable adapter,
        or one that could never fit the pool.
        """
        manifest = self._backend.inspect(path)
        slabs = self._backend.slabs(manifest)
        num_pages = slabs.pages_for(self._backend.num_slabs(manifest))
        if num_pages >= self._pool.num_usable:
            raise AdapterFormatError(
                f"{path}: needs {num_pages} pages of the arena, which has {self._pool.num_usable} "
                "and must hold KV too; raise memory_bytes"
            )
        adapter = Adapter(name, next(self._versions), manifest, slabs, num_pages)
        self._retire(self._current.get(name))
        self._current[name] = adapter
        return adapter

    def unregister(self, name: str) -> None:
        """Forget `name`; requests that hold it finish with it, then its pages go back. UnknownAdapter if absent."""
        self._retire(self.get(name))
        del self._current[name]

    def get(self, name: str) -> Adapter:
        try:
            return self._current[name]
        except KeyError:
            raise UnknownAdapter(f"adapter {name!r} is not registered") from None

    def __contains__(self, name: str) -> bool:
        return name in self._current

    def names(self) -> list[str]:
        return sorted(self._current)

    def describe(self) -> list[AdapterInfo]:
        return [
            AdapterInfo(a.name, a.version, a.rank, a.manifest.targets, a.manifest.path, a.tier.value, a.references,
                        len(a.pages))
            for _, a in sorted(self._current.items())
        ]  # fmt: skip

    # -- residency

    def acquire(self, adapter: Adapter) -> None:
        """Pin `adapter` for a request, loading it into pages when it is not resident.

        Raises OutOfPages when pages are short even without idle adapters, AdapterFormatError when its weights can't
        be read; either way nothing is held.
        """
        if not adapter.pages:
            available = self._pool.num_free + self.reclaimable_pages()
            if available < adapter.num_pages:
                raise OutOfPages(f"adapter {adapter.name!r} needs {adapter.num_pages} pages, {available} can be had")
            image = self._backend.read(adapter.manifest, adapter.slabs)
            self.make_room(adapter.num_pages)
            pages = self._pool.allocate(adapter.num_pages, PageKind.ADAPTER)
            try:
                self._backend.place(image, pages)
            except BaseException:
                self._pool.release(pages)
                raise
            adapter.pages = pages
            self.num_loads += 1
            if not self._is_current(adapter) and adapter not in self._retired:
                self._retired.append(adapter)
        adapter.references += 1
        adapter.last_used = next(self._clock)

    def release(self, adapter: Adapter) -> None:
        """Drop a request's pin. The adapter stays resident unless it was replaced meanwhile."""
        adapter.references -= 1
        adapter.last_used = next(self._clock)
        if adapter.references == 0 and not self._is_current(adapter):
            self._retired.remove(adapter)
            self._evict(adapter)

    def reclaimable_pages(self) -> int:
        """Pages that `make_room` could free."""
        return sum(len(a.pages) for a in self._current.values() if a.references == 0)

    def make_room(self, num_pages: int) -> bool:
        """Evict idle adapters, least recently used first, until `num_pages` are free; False if that can't be had.

        When it can't be had nothing is evicted: giving up adapters would not help whoever asked.
        """
        short = num_pages - self._pool.num_free
        if short <= 0:
            return True
        if self.reclaimable_pages() < short:
            return False
        idle = sorted((a for a in self._current.values() if a.pages and a.references == 0), key=lambda a: a.last_used)
        for adapter in idle:
            if self._pool.num_free >= num_pages:
                break
            self._evict(adapter)
        return True

    def evict_idle(self) -> int:
        """Evict every idle adapter; returns how many."""
        idle = [a for a in self._current.values() if a.pages and a.references == 0]
        for adapter in idle:
            self._evict(adapter)
        return len(idle)

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """What the store holds, for `PagePool.check_integrity`."""
        for adapter in itertools.chain(self._current.values(), self._retired):
            yield PageKind.ADAPTER, adapter.pages

    def _is_current(self, adapter: Adapter) -> bool:
        return self._current.get(adapter.name) is adapter

    def _retire(self, adapter: Adapter | None) -> None:
        if adapter is None:
            return
        if adapter.references:
            self._retired.append(adapter)
        else:
            self._evict(adapter)

    def _evict(self, adapter: Adapter) -> None:
        if adapter.pages:
            pages, adapter.pages = adapter.pages, []
            self._pool.release(pages)
            self.num_evictions += 1
