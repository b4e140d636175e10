"""The adapter store: which adapters exist, where their bytes are, who is using them.

An adapter name points at its current version; requests hold a version, so a reload never changes what a running
request computes with. Idle resident adapters stay in the pool until their pages are wanted.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from .adapter import Adapter, AdapterInfo, Tier
from .adapter_backend import AdapterBackend
from .adapter_format import AdapterFormatError, AdapterManifest
from .adapter_layout import AdapterLayout
from .adapter_name import check_name
from .eviction import EvictionOrder, RestoreCosts
from .host_image import HostImage
from .host_images import HostImages, ReadCounts
from .loads_in_flight import LoadsInFlight
from .pages import OutOfPages, PageKind, PagePool

logger = logging.getLogger(__name__)


class UnknownAdapter(KeyError):
    """No adapter is registered under the name."""

    def __str__(self) -> str:
        return str(self.args[0])


class AdapterStore:
    """Registers, reads, loads, pins and evicts adapters; its pages come from the pool that the KV cache uses."""

    def __init__(
        self,
        pool: PagePool,
        backend: AdapterBackend,
        images: HostImages,
        order: EvictionOrder,
        costs: RestoreCosts,
        page_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._backend = backend
        self._images = images
        self._order = order
        self._costs = costs
        self._page_bytes = page_bytes
        self._clock = clock
        self._current: dict[str, Adapter] = {}
        # Replaced or removed versions that requests still hold. In order: what is done with each must not depend on
        # where objects happen to lie in memory.
        self._retired: dict[Adapter, None] = {}
        self._pinned: set[Adapter] = set()
        self._resident: dict[Adapter, None] = {}
        self._by_version: dict[int, Adapter] = {}  # whose bytes have been asked for
        self._loads = LoadsInFlight(pool)
        self._versions = itertools.count(1)
        self.on_gone: Callable[[int], None] = lambda version: None
        self.num_idle_pages = 0
        self.num_hits = 0
        self.num_loads = 0
        self.num_streamed = 0
        self.num_prefetched = 0
        self.num_evictions = 0

    # -- registry

    def register(self, name: str, source: Path | AdapterManifest, *, check_weights: bool = False) -> Adapter:
        """Make `source` the adapter `name`, replacing an earlier version for requests to come.

        source: a directory, which is read and checked here, or the manifest of one that was. check_weights: read the
        weights now, so that what only they can tell, such as NaN, is known before the earlier version is given up; the
        caller waits for the disk, and the first request doesn't.
        Raises AdapterFormatError and keeps the earlier version when the directory does not hold a servable adapter,
        or one that could never fit the pool.
        """
        check_name(name)
        manifest = source if isinstance(source, AdapterManifest) else self._backend.inspect(source)
        layout = self.layout_of(manifest)
        adapter = Adapter(name, next(self._versions), manifest, layout)
        if check_weights:
            self._request(adapter)
            self._images.take(adapter.version)
        previous = self._current.get(name)
        self._retire(previous)
        self._current[name] = adapter
        if previous is not None:
            self.unpin(previous)
        return adapter

    def layout_of(self, manifest: AdapterManifest) -> AdapterLayout:
        """Where the weights go; may be called from any thread. AdapterFormatError when they could never fit."""
        layout = self._backend.layout(manifest)
        if layout.num_pages >= self._pool.num_usable:
            raise AdapterFormatError(
                f"{manifest.path}: needs {layout.num_pages} pages of the arena, which has {self._pool.num_usable} "
                "and must hold KV too; raise memory_bytes"
            )
        return layout

    def unregister(self, name: str) -> None:
        """Forget `name`; requests that hold it finish with it, then its pages go back. UnknownAdapter if absent."""
        adapter = self.get(name)
        del self._current[name]
        self._retire(adapter)
        self.unpin(adapter)

    def get(self, name: str) -> Adapter:
        try:
            return self._current[name]
        except KeyError:
            raise UnknownAdapter(f"adapter {name!r} is not registered") from None

    def __contains__(self, name: str) -> bool:
        return name in self._current

    def __len__(self) -> int:
        return len(self._current)

    def names(self) -> list[str]:
        return sorted(self._current)

    def describe(self) -> list[AdapterInfo]:
        return [
            AdapterInfo(a.name, a.version, a.rank, a.manifest.targets, a.manifest.path, self.tier(a).value,
                        a.references, len(a.pages))
            for _, a in sorted(self._current.items())
        ]  # fmt: skip

    # -- tiers

    def tier(self, adapter: Adapter) -> Tier:
        if adapter.pages:
            return Tier.DEVICE if adapter.transfer is None else Tier.LOADING
        if self._images.error(adapter.version) is not None:
            return Tier.FAILED
        if self._images.is_ready(adapter.version):
            return Tier.HOST
        return Tier.LOADING if self._images.is_requested(adapter.version) else Tier.DISK

    def is_requested(self, adapter: Adapter) -> bool:
        """True if its bytes are in host memory or being read."""
        return self._images.is_requested(adapter.version)

    @property
    def most_near(self) -> int:
        """How many adapters `near` gives at most."""
        return len(self._resident) + len(self._images)

    def near(self) -> Iterable[Adapter]:
        """Adapters that are resident, in host memory or being read."""
        by_version = self._by_version
        return {**self._resident, **dict.fromkeys(by_version[version] for version in self._images)}

    def read_ahead(self, adapters: Iterable[Adapter]) -> None:
        """Start reading, in order, those that are on disk only, as many as host memory takes beside each other.

        What requests hold keeps its room there. The first is read whatever its size, so that there is always progress.
        """
        num_bytes = 0
        for adapter in dict.fromkeys(adapters):
            if not adapter.pages:
                size = adapter.num_pages * self._page_bytes
                num_bytes += size
                if num_bytes > size and not self.is_requested(adapter):  # all others have their room already
                    has_room = num_bytes <= self._images.capacity_bytes and self._images.has_room(size)
                    if not has_room:
                        return
                self._request(adapter)

    def watch_reads(self) -> None:
        """Give up reads that bring nothing any more, and let others go on beside slow ones."""
        self._images.watch()

    def is_slow(self, adapter: Adapter) -> bool:
        """True if it is being read for so long that others are read beside it."""
        return self._images.is_slow(adapter.version)

    def unfit(self, adapters: Iterable[Adapter]) -> list[Adapter]:
        """Those that the arena can never hold beside the pinned ones."""
        most = self._pool.num_usable - self.num_pinned_pages
        return [adapter for adapter in adapters if adapter.num_pages > most and not adapter.pages]

    @property
    def has_unreadable(self) -> bool:
        """True if reads have failed of which nobody was told yet."""
        return self._images.has_failures

    def unreadable(self, adapter: Adapter) -> BaseException | None:
        """Reason why its last read failed; None when it didn't, or when somebody was told."""
        return self._images.error(adapter.version)

    def forget_unreadable(self) -> None:
        """Everybody was told: what could not be read is read again for requests to come."""
        self._images.forget_failures()

    def read_counts(self) -> ReadCounts:
        return self._images.counts()

    def seconds_to_read(self, adapter: Adapter) -> float:
        """How long, by what reads have taken so far, until the rest of an adapter that is being read is here."""
        left = 1 - max(0, self._images.peek(adapter.version).stream.num_ready) / adapter.layout.num_layers
        return left * adapter.num_pages * self._costs.disk_adapter_page

    @property
    def has_transfers(self) -> bool:
        """True if pages will become idle or free without anybody's doing."""
        return bool(self._loads)

    def poll(self) -> list[tuple[Adapter, BaseException]]:
        """Take note of transfers that have ended; returns the adapters whose bytes will never come, and why.

        Whoever runs with one of those must stop; then it is to be evicted.
        """
        failed: list[tuple[Adapter, BaseException]] = []
        if not self._loads:
            return failed
        self._images.watch()
        self._loads.free_what_is_quiet()
        for adapter, start, error in self._loads.ended():
            if error is None:
                self._observe(adapter, "host_adapter_page", start)
                self._loads.end(adapter)
                self._offer(adapter)
            else:
                failed.append((adapter, error))
                if self._images.error(adapter.version) is None:  # else those that wait for it are still to be told
                    self._images.drop(adapter.version)
                self.unpin(adapter)
        return failed

    def wait_for_reads(self, timeout: float) -> None:
        """Sleep until a read under way ends, at most `timeout` seconds."""
        self._images.wait(timeout)

    # -- use

    def hold(self, adapter: Adapter) -> None:
        """A request came that will use this version."""
        adapter.requests += 1
        if self._images.error(adapter.version) is not None:
            self._images.drop(adapter.version)  # it is tried again
        if adapter.requests == 1:
            self._offer(adapter)

    def let_go(self, adapter: Adapter) -> None:
        """A request that held this version has ended."""
        adapter.requests -= 1
        if adapter.requests == 0:
            if adapter in self._retired:
                self._remove(adapter)
            else:
                self._offer(adapter)

    def acquire(self, adapter: Adapter, *, stream: bool = False) -> None:
        """Pin `adapter` for a running request, loading it into free pages when it is not resident.

        stream: don't wait for a read that is under way; the adapter then has a `transfer`.
        Raises OutOfPages when free pages are short, AdapterFormatError when its weights can't be read; either way
        nothing is held.
        """
        if adapter.pages:
            self.num_hits += 1
        else:
            self._load(adapter, stream)
        if adapter.is_idle:
            self._withdraw(adapter)
        adapter.references += 1
        adapter.uses += 1

    def prefetch(self, adapter: Adapter) -> None:
        """Load an adapter that is in host memory into free pages, for a request to come; it is idle when it is there.

        Raises what `acquire` raises.
        """
        self._load(adapter, stream=False)
        self.num_prefetched += 1
        self._offer(adapter)

    def release(self, adapter: Adapter) -> None:
        """Drop a running request's pin. The adapter stays resident until its pages are wanted."""
        adapter.references -= 1
        if adapter.references == 0:
            self._offer(adapter)

    def pin(self, adapter: Adapter) -> None:
        """Keep `adapter` resident until `unpin`, loading it into free pages now. Raises what `acquire` raises."""
        if adapter not in self._pinned:
            if adapter.transfer is not None:
                self._wait_for_read(adapter)
            self.acquire(adapter)
            self._pinned.add(adapter)
            adapter.requests += 1

    def unpin(self, adapter: Adapter) -> None:
        """Let a pinned adapter be evicted again when idle. Nothing happens when it is not pinned."""
        if adapter in self._pinned:
            self._pinned.remove(adapter)
            self.release(adapter)
            self.let_go(adapter)

    def is_pinned(self, adapter: Adapter) -> bool:
        return adapter in self._pinned

    @property
    def num_pinned_pages(self) -> int:
        return sum(len(adapter.pages) for adapter in self._pinned) if self._pinned else 0

    def evict(self, adapter: Adapter) -> None:
        """Give up the pages of an adapter that no running request uses; its host image, if there is one, stays.

        If requests hold it and there is none, one is made: its directory may hold something else by now.
        """
        self._withdraw(adapter)
        if adapter.requests and adapter.transfer is None and not self._is_on_host(adapter):
            self._save(adapter)
        pages, adapter.pages = adapter.pages, []
        del self._resident[adapter]
        if adapter.transfer is None:
            self._pool.release(pages)
        else:
            self._loads.cancel(adapter, pages)
        self.num_evictions += 1

    def give_up_loads(self) -> bool:
        """Take back pages that no running request uses and into which bytes are still being read; whether there were.

        The reads go on into host memory. What has been read and is only being copied is left to come.
        """
        unused = [
            adapter
            for adapter in self._loads.adapters()
            if not adapter.references and not self._images.is_ready(adapter.version)
        ]
        for adapter in unused:
            self.evict(adapter)
        return bool(unused)

    def evict_idle(self) -> int:
        """Evict every idle adapter; returns how many."""
        idle = [a for a in (*self._current.values(), *self._retired) if a.pages and a.references == 0]
        for adapter in idle:
            self.evict(adapter)
        return len(idle)

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """What the store holds, for `PagePool.check_integrity`."""
        for adapter in itertools.chain(self._current.values(), self._retired):
            yield PageKind.ADAPTER, adapter.pages
        yield from self._loads.holders()

    def close(self) -> None:
        self._images.close()

    def _load(self, adapter: Adapter, stream: bool) -> None:
        if self._pool.num_free < adapter.num_pages:
            raise OutOfPages(
                f"adapter {adapter.name!r} needs {adapter.num_pages} pages, {self._pool.num_free} are free"
            )
        self._request(adapter)
        stream = stream and not self._images.is_ready(adapter.version)
        image = self._images.peek(adapter.version) if stream else self._images.take(adapter.version)
        pages = self._pool.allocate(adapter.num_pages, PageKind.ADAPTER)
        start = self._clock()
        try:
            transfer = self._backend.place(image, adapter.layout, pages)
        except BaseException:
            self._pool.release(pages)
            raise
        adapter.pages = pages
        self._resident[adapter] = None
        self.num_loads += 1
        self.num_streamed += stream
        if transfer is None:
            self._observe(adapter, "host_adapter_page", start)
        else:
            self._loads.begin(adapter, transfer, image, start)

    def _request(self, adapter: Adapter) -> None:
        if self._images.keep(adapter.version):
            return
        manifest, layout = adapter.manifest, adapter.layout
        self._by_version[adapter.version] = adapter

        def read(image: HostImage) -> None:
            start = self._clock()
            self._backend.read(manifest, layout, image)
            self._observe(adapter, "disk_adapter_page", start)

        self._images.request(
            adapter.version,
            layout.num_pages * self._page_bytes,
            read,
            label=str(manifest.path),
            may_drop=lambda: self._may_drop(adapter),
        )

    def _may_drop(self, adapter: Adapter) -> bool:
        """True if a host image may make room: nobody holds the version, or its pages can be saved in time."""
        return adapter.requests == 0 or (bool(adapter.pages) and adapter.transfer is None)

    def _is_on_host(self, adapter: Adapter) -> bool:
        return self._images.is_ready(adapter.version) and self._images.error(adapter.version) is None

    def _save(self, adapter: Adapter) -> None:
        """Make a host image of a resident adapter; without one it will be read again, if it can be."""
        try:
            image = self._backend.save(adapter.layout, adapter.pages)
        except Exception:
            logger.exception("saving %r failed", adapter)
            return
        if image is not None:
            self._by_version[adapter.version] = adapter
            size = adapter.num_pages * self._page_bytes
            self._images.put(adapter.version, size, image, may_drop=lambda: self._may_drop(adapter))

    def _observe(self, adapter: Adapter, cost: str, start: float) -> None:
        seconds = self._clock() - start
        self._costs.observe(cost, seconds / adapter.num_pages)
        if cost == "host_adapter_page":
            adapter.load_seconds = seconds

    def _wait_for_read(self, adapter: Adapter) -> None:
        """Sleep until an adapter in flight has been read; raises why it can't be."""
        image = self._loads.image(adapter)
        if image.error is None and image.stream.num_ready < adapter.layout.num_layers:
            self._images.take(adapter.version)
        if image.error is not None:
            raise image.error

    def _offer(self, adapter: Adapter) -> None:
        """Let an idle resident adapter compete for its pages; one whose bytes are still coming keeps them."""
        if not adapter.pages or adapter.references or adapter.transfer is not None:
            return
        if not adapter.is_idle:
            adapter.is_idle = True
            self.num_idle_pages += len(adapter.pages)
        on_host = self._images.is_ready(adapter.version)
        cost = self._costs.host_adapter_page if on_host else self._costs.disk_adapter_page
        num_pages = len(adapter.pages)
        self._order.add(adapter, num_pages, cost * num_pages, adapter.uses, wanted=adapter.requests > 0)

    def _withdraw(self, adapter: Adapter) -> None:
        """The adapter is in use, or gone: it no longer competes."""
        self._order.discard(adapter)
        if adapter.is_idle:
            adapter.is_idle = False
            self.num_idle_pages -= len(adapter.pages)

    def _retire(self, adapter: Adapter | None) -> None:
        if adapter is None:
            return
        if adapter.requests:
            self._retired[adapter] = None
            if not adapter.pages or adapter.transfer is not None:
                self._request(adapter)  # the directory may be about to change
        else:
            self._remove(adapter)

    def _remove(self, adapter: Adapter) -> None:
        self._retired.pop(adapter, None)
        if adapter.pages:
            self.evict(adapter)
        self._images.drop(adapter.version)
        self._by_version.pop(adapter.version, None)
        self.on_gone(adapter.version)
