"""Loading of adapters: reads from disk into host memory, and copies from there into pages."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from ..host.image import HostImage
from ..host.images import HostImages
from ..pages.eviction import RestoreCosts
from ..pages.pool import OutOfPages, PageKind, PagePool
from ..transfers.transfer import ExecutorLost, Transfer
from .adapter import Adapter, AdapterBackend

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Load:
    """image: what is being loaded. start: seconds, on the owner's clock. left: the pages of a cancelled one."""

    adapter: Adapter
    image: HostImage
    start: float
    left: list[int] | None = None


@dataclass(eq=False)
class AdapterLoads:
    """Reads versions of adapters into host images, which stay as long as there is room for them, and fills pages.

    under_way: loads with incomplete pages, and cancelled loads until nothing writes to their pages.
    """

    _pool: PagePool
    _backend: AdapterBackend
    _images: HostImages[Adapter]
    _costs: RestoreCosts
    _page_bytes: int
    _clock: Callable[[], float]
    under_way: dict[Transfer, _Load] = field(default_factory=dict)

    # -- from the disk into host memory

    def request(self, adapter: Adapter) -> None:
        """Start reading an adapter unless it is in host memory, being read, or has failed."""
        if self._images.keep(adapter):
            return
        if adapter.transfer is not None and _is_whole(load := self.under_way[adapter.transfer]):
            # The image made room for others when it was only copied from. The directory may hold something else by now.
            self.keep(adapter, load.image)
            return
        manifest, layout = adapter.manifest, adapter.layout

        def read(image: HostImage) -> None:
            start = self._clock()
            self._backend.read(manifest, layout, image)
            self._costs.observe("disk_adapter_page", (self._clock() - start) / layout.num_pages)

        self._images.request(
            adapter,
            self._size(adapter),
            read,
            label=str(manifest.path),
            group=str(manifest.path.parent),
            may_drop=lambda: _may_drop(adapter),
        )

    def ahead(self, adapters: Iterable[Adapter]) -> None:
        """Start reading, in order, the adapters that are on disk only, as many as host memory holds together.

        Images that requests hold keep their room. The first adapter is read whatever its size, so that there is always
        progress. Earlier reads that have not begun wait behind these.
        """
        adapters, num_bytes = list(dict.fromkeys(adapters)), 0
        for adapter in adapters:
            if not adapter.pages:
                size = self._size(adapter)
                num_bytes += size
                if num_bytes > size and not self._images.is_requested(adapter):  # a requested one has its room already
                    has_room = num_bytes <= self._images.budget.capacity_bytes and self._images.has_room(size)
                    if not has_room:
                        break
                self.request(adapter)
        self._images.arrange(adapters)

    def keep(self, adapter: Adapter, image: HostImage) -> None:
        """Keep an image made elsewhere, in place of the present one."""
        self._images.put(adapter, self._size(adapter), image, may_drop=lambda: _may_drop(adapter))

    def make_image(self, adapter: Adapter) -> None:
        """Make an image of a resident adapter; without one it will be read again, if it can be. Raises ExecutorLost."""
        if self._images.is_ready(adapter) and self._images.error(adapter) is None:
            return
        try:
            image = self._backend.save(adapter.layout, adapter.pages)
        except ExecutorLost:
            raise
        except Exception:
            logger.exception("saving %r failed", adapter)
            return
        if image is not None:
            self.keep(adapter, image)

    def fetch(self, adapter: Adapter) -> bool:
        """Start reading an adapter if needed; True once all of it is in memory. Raises its read's error."""
        if adapter.transfer is not None:
            image = self.under_way[adapter.transfer].image
            if image.error is not None:
                raise image.error
        elif adapter.pages:
            return True
        else:
            self.request(adapter)
            self._images.watch()
            image = self._images.take(adapter)
        return image.stream.num_ready == adapter.layout.num_layers

    def is_reading(self, adapter: Adapter) -> bool:
        """True if an adapter has pages into which bytes are still being read."""
        return adapter.transfer is not None and _is_coming(self.under_way[adapter.transfer])

    def seconds_left(self, adapter: Adapter, patience: float) -> float:
        """Estimated seconds until the rest of an adapter has been read, from the times of earlier reads and its own
        pace.

        Infinite before its first layer, since a disk that hangs looks no different until then, and for a read without
        progress for `patience` longer than the estimate.
        """
        load = None if adapter.transfer is None else self.under_way[adapter.transfer]
        image = self._images.peek(adapter) if load is None else load.image
        num_layers, num_ready = adapter.layout.num_layers, image.stream.num_ready
        if num_ready <= 0:
            return math.inf
        num_left = num_layers - num_ready
        quiet, layer_seconds = self._images.pace(adapter)
        left = num_left * max(layer_seconds, adapter.num_pages * self._costs.disk_adapter_page / num_layers)
        return left if quiet <= left + patience else math.inf

    # -- from host memory into pages

    def load(self, adapter: Adapter) -> bool:
        """Give an adapter free pages and begin to fill them; True if it is still being read. Does not wait.

        The adapter has a `transfer` until all of it is there. Raises OutOfPages when free pages are short, the error of
        its read, or what the copy raises; then it has no pages.
        """
        if self._pool.num_free < adapter.num_pages:
            raise OutOfPages(
                f"adapter {adapter.name!r} needs {adapter.num_pages} pages, {self._pool.num_free} are free"
            )
        self.request(adapter)
        image = self._images.take(adapter)
        is_streamed = not self._images.is_ready(adapter)
        pages = self._pool.allocate(adapter.num_pages, PageKind.ADAPTER)
        start = self._clock()
        try:
            adapter.transfer = self._backend.place(image, adapter.layout, pages)
        except BaseException:
            self._pool.release(pages)
            raise
        adapter.pages = pages
        if adapter.transfer is None:
            self._observe(adapter, start)
        else:
            self.under_way[adapter.transfer] = _Load(adapter, image, start)
        return is_streamed

    def finish_ended(self) -> list[tuple[Adapter, BaseException | None]]:
        """Complete finished loads, and free the pages of cancelled ones once nothing writes to them.

        Return the loaded adapters, with None, and the failed ones, with their error; the caller must evict the failed
        ones. Raises ExecutorLost.
        """
        self._free_what_is_quiet()
        found: list[tuple[Adapter, BaseException | None]] = []
        for transfer, load in list(self.under_way.items()):
            adapter = load.adapter
            if load.left is not None:
                continue
            try:
                is_done, has_failed = transfer.is_done(), transfer.has_failed()
            except ExecutorLost:
                raise
            except Exception as error:  # a driver that refuses a copy; others' loads go on
                logger.exception("loading %r failed", adapter)
                found.append((adapter, error.with_traceback(None)))
                continue
            if is_done:
                self._observe(adapter, load.start)
                del self.under_way[transfer]
                adapter.transfer = None
                found.append((adapter, None))
            elif has_failed:
                if isinstance(load.image.error, ExecutorLost):  # the reading thread saw it first
                    raise load.image.error
                found.append((adapter, load.image.error or RuntimeError("its bytes did not come")))
        return found

    def unread(self) -> list[Adapter]:
        """Adapters that have pages into which bytes are still being read."""
        return [load.adapter for load in self.under_way.values() if load.left is None and _is_coming(load)]

    def cancel(self, transfer: Transfer, pages: list[int]) -> None:
        """End a load before its time; its pages are free once nothing writes to them."""
        load = self.under_way[transfer]
        load.adapter.transfer = None
        load.left = pages
        transfer.cancel()
        self._free_what_is_quiet()

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """Pages of cancelled loads, for `PagePool.check_integrity`; an adapter's own are the store's to tell."""
        for load in self.under_way.values():
            if load.left is not None:
                yield PageKind.ADAPTER, load.left

    def _free_what_is_quiet(self) -> None:
        for transfer, load in list(self.under_way.items()):
            if load.left is not None and transfer.is_quiet():
                del self.under_way[transfer]
                self._pool.release(load.left)

    def _observe(self, adapter: Adapter, start: float) -> None:
        adapter.load_seconds = self._clock() - start
        self._costs.observe("host_adapter_page", adapter.load_seconds / adapter.num_pages)

    def _size(self, adapter: Adapter) -> int:
        return adapter.num_pages * self._page_bytes


def _is_whole(load: _Load) -> bool:
    """True once all of its bytes have been read."""
    return load.image.stream.num_ready == load.adapter.layout.num_layers


def _is_coming(load: _Load) -> bool:
    """True while some of its bytes are still being read."""
    return load.image.error is None and not _is_whole(load)


def _may_drop(adapter: Adapter) -> bool:
    """True if a host image may be dropped: no request holds the version, or it can be saved again from its pages."""
    return adapter.requests == 0 or (bool(adapter.pages) and adapter.transfer is None)
