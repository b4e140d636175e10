"""Adapter loads: reads from disk into host memory, and copies from host memory into pages.

Tests: tests/memory/adapters/test_adapter_store.py.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from ..host.image import HostImage
from ..host.images import HostImages
from ..pages.eviction import RestoreCosts
from ..pages.pool import OutOfPages, PageKind, PagePool
from ..transfers.transfer import ExecutorLost, Transfer
from .adapter import Adapter, AdapterBackend
from .adapter_costs import AdapterCosts

logger = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Load:
    """A load in progress, or a cancelled one whose pages are still being written."""

    adapter: Adapter
    image: HostImage
    """The image that is being copied."""
    start: float
    """Start time in seconds, on the owner's clock."""
    is_staged: bool = False
    """True once the image was seen in slow memory: the copies go on from there, wherever it is moved."""
    left: list[int] | None = None
    """The pages of a cancelled load; None for a live load."""


class AdapterLoads:
    """Reads adapter versions into host images, which stay as long as there is room, and fills pages from them."""

    def __init__(
        self,
        pool: PagePool,
        backend: AdapterBackend,
        images: HostImages[Adapter],
        *,
        costs: RestoreCosts,
        spent: AdapterCosts,
        page_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._pool, self._backend, self._images = pool, backend, images
        self._costs, self._page_bytes, self._clock = costs, page_bytes, clock
        self._spent = spent
        self.under_way: dict[Transfer, _Load] = {}
        """Loads whose pages are incomplete, and cancelled loads until nothing writes to their pages."""

    # -- from the disk into host memory

    def request(self, adapter: Adapter) -> None:
        """Start reading an adapter, unless it needs no pages, is in host memory, is being read, or has failed."""
        if not adapter.num_pages or self._images.keep(adapter):
            return
        if adapter.transfer is not None and _is_whole(load := self.under_way[adapter.transfer]):
            # The image was dropped for others while it was only the source of a copy. By now the directory may hold
            # other files.
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
            worth=lambda: self._worth(adapter),
        )

    def ahead(self, adapters: Iterable[Adapter]) -> None:
        """Start reading, in order, the adapters that are only on disk, as many as fit in host memory together.

        Images that requests hold keep their room. The first adapter is read whatever its size, so that there is always
        progress. Earlier reads that have not begun wait until these are done.
        """
        adapters, num_bytes = list(dict.fromkeys(adapters)), 0
        for adapter in adapters:
            if not adapter.pages:
                size = self._size(adapter)
                num_bytes += size
                if num_bytes > size and not self._images.is_requested(adapter):  # a requested one already has its room
                    has_room = num_bytes <= self._images.budget.capacity_bytes and self._images.has_room(size)
                    if not has_room:
                        break
                self.request(adapter)
        self._images.arrange(adapters)

    def keep(self, adapter: Adapter, image: HostImage) -> None:
        """Keep an image that was made elsewhere, in place of the present one."""
        self._images.put(
            adapter,
            self._size(adapter),
            image,
            may_drop=lambda: _may_drop(adapter),
            worth=lambda: self._worth(adapter),
        )

    def make_image(self, adapter: Adapter) -> None:
        """Make an image of a resident adapter. If that fails, it is read again if possible. Raises ExecutorLost."""
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
        """Start reading an adapter if needed; return True once all of it is here. Raises its read's error."""
        if adapter.transfer is not None:
            image = self.under_way[adapter.transfer].image
            if image.error is not None:
                raise image.error
        elif not adapter.lacks_pages:
            return True
        else:
            self.request(adapter)
            self._images.watch()
            image = self._images.take(adapter)
        return image.stream.num_ready == adapter.layout.num_layers

    def is_reading(self, adapter: Adapter) -> bool:
        """True if the adapter has pages into which bytes are still being read, or copied from slow memory."""
        return adapter.transfer is not None and not _is_near(self.under_way[adapter.transfer])

    def seconds_left(self, adapter: Adapter, patience: float) -> float:
        """Estimate the seconds until the rest of an adapter has been read, from earlier reads and its own pace.

        Infinite before its first layer, because a disk that hangs looks the same until then. Also infinite for a read
        without progress for `patience` longer than the estimate, and for bytes in slow memory that no step waits for.
        """
        load = None if adapter.transfer is None else self.under_way[adapter.transfer]
        if load is not None and not _is_coming(load) and not _is_near(load):
            return math.inf
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
        """Give an adapter free pages and start filling them, without waiting; return True if it is still being read.

        The adapter has a `transfer` until its bytes are complete. Raises OutOfPages if free pages are short, the error
        of its read, or the error of the copy; then it has no pages.
        """
        if self._pool.num_free < adapter.num_pages:
            raise OutOfPages(
                f"adapter {adapter.name!r} needs {adapter.num_pages} pages, {self._pool.num_free} are free"
            )
        self.request(adapter)
        image = self._images.take(adapter)
        is_streamed = not self._images.is_ready(adapter)
        pages = self._pool.allocate(adapter.num_pages, PageKind.ADAPTER)
        start, is_slow = self._clock(), image.is_slow
        try:
            adapter.transfer = self._backend.load(image, adapter.layout, pages)
        except BaseException:
            self._pool.release(pages)
            raise
        adapter.pages = pages
        self._images.hasten(adapter)  # for the next time
        if adapter.transfer is None:
            self._observe(adapter, start)
        else:
            self.under_way[adapter.transfer] = _Load(adapter, image, start, is_staged=is_slow)
        return is_streamed

    def finish_ended(self) -> list[tuple[Adapter, BaseException | None]]:
        """Complete finished loads, and free the pages of cancelled loads once nothing writes to them.

        Return loaded adapters with None and failed adapters with their error; the caller must evict the failed ones.
        Raises ExecutorLost.
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
            except Exception as error:  # a driver that refuses a copy; other loads continue
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
                found.append((adapter, load.image.error or RuntimeError("the read ended too early")))
        return found

    def unread(self) -> list[Adapter]:
        """Adapters that have pages into which bytes are still being read."""
        return [load.adapter for load in self.under_way.values() if load.left is None and _is_coming(load)]

    def cancel(self, transfer: Transfer, pages: list[int]) -> None:
        """End a load early; its pages become free once nothing writes to them."""
        load = self.under_way[transfer]
        load.adapter.transfer = None
        load.left = pages
        transfer.cancel()
        self._free_what_is_quiet()

    def holders(self) -> Iterator[tuple[PageKind, list[int]]]:
        """Pages of cancelled loads, for `PagePool.check_integrity`; the store reports the pages of adapters."""
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
        self._spent.note_load(adapter, adapter.load_seconds)
        self._costs.observe("host_adapter_page", adapter.load_seconds / adapter.num_pages)

    def _worth(self, adapter: Adapter) -> tuple[float, int]:
        """Seconds to read an adapter again, and how often it was used."""
        return adapter.num_pages * self._costs.disk_adapter_page, max(1, adapter.uses)

    def _size(self, adapter: Adapter) -> int:
        return adapter.num_pages * self._page_bytes


def _is_whole(load: _Load) -> bool:
    """True once all bytes have been read."""
    return load.image.stream.num_ready == load.adapter.layout.num_layers


def _is_coming(load: _Load) -> bool:
    """True while some bytes are still being read."""
    return load.image.error is None and not _is_whole(load)


def _is_near(load: _Load) -> bool:
    """True once all bytes have been read into memory that is copied without the host."""
    load.is_staged = load.is_staged or load.image.is_slow
    return not load.is_staged and not _is_coming(load)


def _may_drop(adapter: Adapter) -> bool:
    """True if a host image may be dropped: no request holds the version, or its pages can be saved again."""
    return adapter.requests == 0 or (bool(adapter.pages) and adapter.transfer is None)
