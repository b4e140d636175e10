"""The adapter store: which adapters exist, where their bytes are, and which requests use them.

An adapter name points at its current version. Requests hold a version, so a reload never changes the weights that a
running request uses. Idle resident adapters stay in the pool until their pages are wanted.

Tests: tests/memory/adapters/test_adapter_store.py, tests/memory/adapters/test_reclaim.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from pathlib import Path

from ..files.composed import composed
from ..files.error import AdapterFormatError
from ..files.manifest import AdapterManifest
from ..host.image import HostImage
from ..host.images import HostImages
from ..pages.adapter_layout import AdapterLayout
from ..pages.eviction import EvictionOrder, RestoreCosts
from ..pages.pool import PageKind, PagePool
from .adapter import Adapter, AdapterBackend, Tier, check_name
from .adapter_costs import AdapterCosts
from .composed_names import ComposedNames
from .loads import AdapterLoads
from .pins import Pins
from .versions import VersionNames, plain_of, versioned


class UnknownAdapter(KeyError):
    """No adapter is registered under the name."""

    def __str__(self) -> str:
        return str(self.args[0])


class AdapterStore:
    """Registers, loads, pins and evicts adapters; its pages come from the pool that the KV cache uses."""

    def __init__(
        self,
        pool: PagePool,
        backend: AdapterBackend,
        images: HostImages[Adapter],
        order: EvictionOrder,
        costs: RestoreCosts,
        page_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._backend = backend
        self.images = images
        self.spent = AdapterCosts(clock)
        self.loads = AdapterLoads(
            pool, backend, images, costs=costs, spent=self.spent, page_bytes=page_bytes, clock=clock
        )
        self._order = order
        self._costs = costs
        self._current: VersionNames[Adapter] = VersionNames()
        # Replaced or removed versions that requests still hold. A dict keeps them in order: their handling must not
        # depend on object addresses.
        self._retired: dict[Adapter, None] = {}
        self._composed: ComposedNames[Adapter] = ComposedNames()
        self._by_content: dict[str, dict[Adapter, None]] = {}  # registered ones, oldest first
        self._by_version: dict[int, Adapter] = {}  # registered ones, and those composed of them
        self._num_registered_pages = 0
        self.pins = Pins(self.acquire, self.release, self.let_go)
        self._resident: dict[Adapter, None] = {}
        self._versions = itertools.count(1)
        self.on_leaving: Callable[[Adapter, bool], None] = lambda adapter, is_gone: None
        """Called with False before an adapter loses its pages or stops being its name's current version, and with True
        when the version is removed for good.
        """
        self.num_idle_pages = 0
        self.num_hits = 0
        self.num_loads = 0
        self.num_streamed = 0
        self.num_evictions = 0

    # -- registry

    def register(
        self,
        name: str,
        source: Path | AdapterManifest,
        image: HostImage | None = None,
        *,
        label: str | None = None,
        keep: int | None = 1,
    ) -> Adapter:
        """Make `source` the adapter `name`, replacing an earlier version for future requests.

        name: or `name@label`, for a version that leaves all others as they are. label: its version; None for the name's
        next number. keep: see `VersionNames.put`. source: a directory, which is
        read and checked here, or the manifest of a checked directory. image: the weights of a checked manifest; then
        the checked weights are served even if the directory changes. Raises AdapterFormatError, and keeps the earlier
        version, if the directory holds no servable adapter, or one that could never fit the pool.
        """
        check_name(name)
        manifest = source if isinstance(source, AdapterManifest) else self._backend.inspect(source)
        layout = self.layout_of(manifest)
        plain = plain_of(name, label)
        label = label or str(self._current.last_number(name) + 1)
        adapter = Adapter(plain, next(self._versions), manifest, layout, label)
        if image is not None:
            self.loads.keep(adapter, image)
        previous = self._current.find(name) if name in self._current else None
        gone = self._current.put(name, adapter, keep)
        self._num_registered_pages += adapter.num_pages
        self._index(adapter)
        for each in gone:
            self._retire(each)
            self.pins.remove(each)
        if previous is not None and previous not in gone:
            self.on_leaving(previous, False)
            self.pins.remove(previous)
        return adapter

    def compose(self, name: str, parts: Sequence[tuple[Adapter, float]], tenant: str = "") -> Adapter:
        """The adapter that registered versions with scales make together, an ordinary version of its own.

        name: for any equal composition the same. It lasts until one of them leaves its name. tenant: who requests it.
        Raises AdapterFormatError if they can't be composed, or could never fit the pool.
        """
        sources = tuple(part for part, _ in parts)
        known = self._composed.get(name)
        if known is not None and known.sources == sources:
            self._composed.request(name, tenant, self._retire)
            return known
        manifest = composed([(part.manifest, scale) for part, scale in parts])
        adapter = Adapter(name, next(self._versions), manifest, self.layout_of(manifest), sources=sources)
        if known is not None:
            self._retire(known)
        self._composed.put(name, adapter)
        self._index(adapter)
        self._composed.request(name, tenant, self._retire)
        return adapter

    def last_number(self, name: str) -> int:
        """The highest version number that a name has had."""
        return self._current.last_number(name)

    def layout_of(self, manifest: AdapterManifest) -> AdapterLayout:
        """Layout of an adapter's weights; thread-safe. Raises AdapterFormatError if they could never fit."""
        layout = self._backend.layout(manifest)
        if layout.num_pages >= self._pool.num_usable:
            raise AdapterFormatError(
                f"{manifest.path}: needs {layout.num_pages} pages of the pool, which has {self._pool.num_usable} "
                "and must hold KV too; raise memory_bytes"
            )
        return layout

    def unregister(self, name: str) -> None:
        """Forget `name`; its pages are freed after the requests that hold it. Raises UnknownAdapter if absent."""
        try:
            adapter = self._current.pop(name)
        except KeyError:
            raise UnknownAdapter(f"adapter {name!r} is not registered") from None
        self._retire(adapter)
        self.pins.remove(adapter)

    def unregister_newest(self, name: str) -> None:
        """Forget the newest version of `name`; the latest kept version, if there is one, becomes the newest."""
        adapter = self._current.promote(name)
        self._retire(adapter)
        self.pins.remove(adapter)

    def get(self, name: str) -> Adapter:
        """Return the newest version of a name, or the version of `name@version`."""
        if (adapter := self._current.find(name)) is None:
            raise UnknownAdapter(f"adapter {name!r} is not registered")
        return adapter

    def latest(self, name: str) -> Adapter:
        """The same, for requests: a name without a version of its own means the latest kept one."""
        if (adapter := self._current.latest(name)) is None:
            raise UnknownAdapter(f"adapter {name!r} is not registered")
        return adapter

    def kept(self, name: str) -> list[str]:
        """`name@version` of the earlier registered versions, oldest first."""
        return self._current.kept(name)

    def find(self, content_hash: str | None) -> Adapter | None:
        """Return a registered adapter with this content hash, under any name; None if none is known."""
        if content_hash is None:
            return None
        return next(iter(self._by_content.get(content_hash, ())), None)

    def find_version(self, version: int) -> Adapter | None:
        """A registered version, or one that is composed of registered ones, by its number."""
        return self._by_version.get(version)

    def content_of(self, version: int) -> str | None:
        """The content hash of a registered version; None if it is not known, or the version is not registered."""
        adapter = self._by_version.get(version)
        return None if adapter is None else adapter.manifest.content_hash

    def parts_of(self, version: int) -> list[str]:
        """The content hashes of what a registered version is composed of, as far as they are known."""
        adapter = self._by_version.get(version)
        sources = () if adapter is None else adapter.manifest.sources
        return [one.content_hash for one, _ in sources if one.content_hash is not None]

    def note(self, adapter: Adapter, manifest: AdapterManifest) -> None:
        """Update the manifest of a registered version, for example with its content hash."""
        self._unindex(adapter)
        adapter.manifest = manifest
        self._index(adapter)
        for other in [one for one in self._composed.values() if adapter in one.sources]:
            scales = [scale for _, scale in other.manifest.sources]
            self.note(
                other, composed([(one.manifest, scale) for one, scale in zip(other.sources, scales, strict=True)])
            )

    def __contains__(self, name: str) -> bool:
        return name in self._current

    def __len__(self) -> int:
        return len(self._current)

    def versions(self) -> Iterator[Adapter]:
        """All versions that are registered, composed of these, or that requests still hold."""
        return itertools.chain(self._current.values(), self._composed.values(), self._retired)

    def names(self) -> list[str]:
        return sorted(self._current)

    def registered(self) -> list[tuple[str, Adapter]]:
        """Every registered version under its name, in no order; an earlier one under `name@version`."""
        return list(self._current.items())

    def cached(self) -> list[tuple[str, Adapter]]:
        """The registered versions with pages or an image, complete or not, by name; all others are only on disk.

        Its cost depends on the number of these versions, not on the number of registered ones.
        """
        near = self._resident.keys() | self.images.keys()
        return sorted(
            (self._name_of(adapter), adapter)
            for adapter in near
            if adapter not in self._retired and not adapter.sources
        )

    def resident(self) -> Iterable[Adapter]:
        """Versions that have pages."""
        return self._resident

    # -- tiers

    def tier(self, adapter: Adapter) -> Tier:
        if adapter.pages:
            return Tier.DEVICE if adapter.transfer is None else Tier.LOADING
        if self.images.error(adapter) is not None:
            return Tier.FAILED
        if self.images.is_ready(adapter):
            return Tier.HOST
        return Tier.LOADING if self.images.is_requested(adapter) else Tier.DISK

    def near(self, adapters: Set[Adapter | None]) -> tuple[Collection[Adapter], Collection[Adapter]]:
        """Split `adapters`: return the resident ones, and the others that are being read."""
        resident, images = self._resident.keys() & adapters, self.images
        if len(resident) + (None in adapters) == len(adapters):
            return resident, ()
        return resident, [each for each in (images.keys() & adapters) - resident if images.is_coming(each)]

    def unfit(self, adapters: Iterable[Adapter]) -> list[Adapter]:
        """Return the adapters that don't fit in the pool next to the pinned ones."""
        most = self._pool.num_usable - self.pins.num_pages
        return [adapter for adapter in adapters if adapter.num_pages > most and not adapter.pages]

    def poll(self) -> list[tuple[Adapter, BaseException]]:
        """Complete ended transfers; return the adapters that failed to load, with their errors.

        The caller must fail their running requests, then evict those that still have pages.
        """
        failed: list[tuple[Adapter, BaseException]] = []
        if not self.loads.under_way:
            return failed
        self.images.watch()
        for adapter, error in self.loads.finish_ended():
            if error is None:
                self._drop_composed_image(adapter)
                self._offer(adapter)
                continue
            failed.append((adapter, error))
            if self.images.error(adapter) is None:  # else waiting requests must still get the error
                self.images.drop(adapter)
            self.pins.remove(adapter)
        return failed

    # -- use

    def hold(self, adapter: Adapter) -> None:
        """Record that a request holds this version."""
        adapter.requests += 1
        if self.images.error(adapter) is not None:
            self.images.drop(adapter)  # it is tried again
        if adapter.requests == 1:
            self._offer(adapter)

    def let_go(self, adapter: Adapter) -> None:
        """Record that a request that held this version has ended."""
        adapter.requests -= 1
        if adapter.requests == 0:
            if adapter in self._retired:
                self._remove(adapter)
            else:
                self._drop_composed_image(adapter)
                self._offer(adapter)

    def acquire(self, adapter: Adapter) -> None:
        """Pin `adapter` for a running request, loading it into free pages if it is not resident.

        It does not wait for a read in progress: the adapter then has a `transfer`. Raises OutOfPages if free pages are
        short, and AdapterFormatError if its weights can't be read; either way nothing is held.
        """
        if adapter.pages or not adapter.lacks_pages:
            self.num_hits += 1
        else:
            self._load(adapter)
        if adapter.is_idle:
            self._withdraw(adapter)
        adapter.references += 1
        adapter.uses += 1

    def prefetch(self, adapter: Adapter) -> None:
        """Load an adapter from host memory into free pages for a future request; it is idle once it is loaded.

        Raises the errors of `acquire`.
        """
        if adapter.lacks_pages:
            self._load(adapter)
        self._offer(adapter)

    def idle(self) -> Iterator[Adapter]:
        """Resident adapters without a pin or a running request."""
        return (adapter for adapter in self._resident if adapter.is_idle)

    def release(self, adapter: Adapter) -> None:
        """Drop a running request's pin. The adapter stays resident until its pages are wanted."""
        adapter.references -= 1
        if adapter.references == 0:
            self._offer(adapter)

    @property
    def num_loadable(self) -> int:
        """How many adapters of the average registered size fit into the free pages and the pages of cached KV."""
        num_pages = self._num_registered_pages
        return self._pool.num_unused * len(self._current) // num_pages if num_pages else self._pool.num_unused

    def evict(self, adapter: Adapter) -> None:
        """Free the pages of an adapter that no running request uses; its host image, if there is one, stays.

        If requests hold it and it has no image, an image is made first, because its directory may hold other files by
        now.
        """
        self.on_leaving(adapter, False)
        self._withdraw(adapter)
        if adapter.requests and adapter.transfer is None:
            self.loads.make_image(adapter)
        pages, adapter.pages = adapter.pages, []
        self.spent.note_pages(adapter, 0)
        del self._resident[adapter]
        if adapter.transfer is None:
            self._pool.release(pages)
        else:
            self.loads.cancel(adapter.transfer, pages)
        self.num_evictions += 1

    def give_up_loads(self) -> bool:
        """Cancel loads that no running request needs and that still wait for reads; return whether there were any.

        The reads continue into host memory. Loads that have been read completely, and are only being copied, continue.
        """
        unused = [adapter for adapter in self.loads.unread() if not adapter.references]
        for adapter in unused:
            self.evict(adapter)
        return bool(unused)

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """Pages that the store holds, for `PagePool.check_integrity`."""
        for adapter in self.versions():
            yield PageKind.ADAPTER, adapter.pages
        yield from self.loads.holders()

    def close(self) -> None:
        self.images.close()

    def _load(self, adapter: Adapter) -> None:
        self.num_streamed += self.loads.load(adapter)
        self._resident[adapter] = None
        self.spent.note_pages(adapter, len(adapter.pages))
        self.num_loads += 1

    def _drop_composed_image(self, adapter: Adapter) -> None:
        """Drop the host image of a composed adapter without requests. Any scales make another one, which may never be
        requested again, and would take the room of adapters that are.
        """
        if adapter.sources and adapter.requests == 0 and adapter.transfer is None:
            self.images.drop(adapter)

    def _offer(self, adapter: Adapter) -> None:
        """Make an idle resident adapter evictable; one that is still being loaded keeps its pages."""
        if not adapter.pages or adapter.references or adapter.transfer is not None:
            return
        if not adapter.is_idle:
            adapter.is_idle = True
            self.num_idle_pages += len(adapter.pages)
        on_host = self.images.is_ready(adapter)
        cost = self._costs.host_adapter_page if on_host else self._costs.disk_adapter_page
        num_pages = len(adapter.pages)
        self._order.add(adapter, num_pages, cost * num_pages, adapter.uses, wanted=adapter.requests > 0)

    def _withdraw(self, adapter: Adapter) -> None:
        """Make an adapter that is in use, or removed, no longer evictable."""
        self._order.discard(adapter)
        if adapter.is_idle:
            adapter.is_idle = False
            self.num_idle_pages -= len(adapter.pages)

    def _name_of(self, adapter: Adapter) -> str:
        newest = adapter.name in self._current and self._current.find(adapter.name) is adapter
        return adapter.name if newest else versioned(adapter.name, adapter.label)

    def _index(self, adapter: Adapter) -> None:
        self._by_version[adapter.version] = adapter
        if (content := adapter.manifest.content_hash) is not None:
            self._by_content.setdefault(content, {})[adapter] = None

    def _unindex(self, adapter: Adapter) -> None:
        self._by_version.pop(adapter.version, None)
        content = adapter.manifest.content_hash
        if content is not None and (same := self._by_content.get(content)) is not None:
            same.pop(adapter, None)
            if not same:
                del self._by_content[content]

    def _retire(self, adapter: Adapter) -> None:
        self._unindex(adapter)
        if adapter.sources:
            self._composed.pop(adapter.name)
        else:
            self._num_registered_pages -= adapter.num_pages
            for other in [each for each in self._composed.values() if adapter in each.sources]:
                self._retire(other)
        self.on_leaving(adapter, False)
        if adapter.requests:
            self._retired[adapter] = None
            if not adapter.pages or adapter.transfer is not None:
                self.loads.request(adapter)  # the directory may be about to change
        else:
            self._remove(adapter)

    def _remove(self, adapter: Adapter) -> None:
        self._retired.pop(adapter, None)
        if adapter.pages:
            self.evict(adapter)
        self.images.drop(adapter)
        if adapter.name not in self._current and not self._current.kept(adapter.name):
            self.spent.forget(adapter.name)
        self.on_leaving(adapter, True)
