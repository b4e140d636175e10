"""Adapters' weights in host memory: read from disk beside the steps, or kept from where they were."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from .adapter import Adapter
from .adapter_backend import AdapterBackend
from .eviction import RestoreCosts
from .host_image import HostImage
from .host_images import HostImages

logger = logging.getLogger(__name__)


class AdapterReads:
    """Reads versions of adapters into host images, which stay as long as there is room for them."""

    def __init__(
        self,
        backend: AdapterBackend,
        images: HostImages,
        costs: RestoreCosts,
        page_bytes: int,
        clock: Callable[[], float],
    ) -> None:
        self._backend = backend
        self._images = images
        self._costs = costs
        self._page_bytes = page_bytes
        self._clock = clock

    def request(self, adapter: Adapter) -> None:
        """Start reading it unless it is in host memory, on its way, or has failed."""
        if self._images.keep(adapter):
            return
        manifest, layout = adapter.manifest, adapter.layout

        def read(image: HostImage) -> None:
            start = self._clock()
            self._backend.read(manifest, layout, image)
            self._costs.observe("disk_adapter_page", (self._clock() - start) / layout.num_pages)

        self._images.request(
            adapter, self._size(adapter), read, label=str(manifest.path), may_drop=lambda: _may_drop(adapter)
        )

    def ahead(self, adapters: Iterable[Adapter]) -> None:
        """Start reading, in order, those that are on disk only, as many as host memory takes beside each other.

        What requests hold keeps its room there. The first is read whatever its size, so that there is always progress.
        """
        num_bytes = 0
        for adapter in dict.fromkeys(adapters):
            if not adapter.pages:
                size = self._size(adapter)
                num_bytes += size
                if num_bytes > size and not self._images.is_requested(adapter):  # all others have their room already
                    has_room = num_bytes <= self._images.capacity_bytes and self._images.has_room(size)
                    if not has_room:
                        return
                self.request(adapter)

    def keep(self, adapter: Adapter, image: HostImage) -> None:
        """Take an image that somebody else has made, in place of what there is."""
        self._images.put(adapter, self._size(adapter), image, may_drop=lambda: _may_drop(adapter))

    def save(self, adapter: Adapter) -> None:
        """Make an image of a resident adapter; without one it will be read again, if it can be."""
        if self._images.is_ready(adapter) and self._images.error(adapter) is None:
            return
        try:
            image = self._backend.save(adapter.layout, adapter.pages)
        except Exception:
            logger.exception("saving %r failed", adapter)
            return
        if image is not None:
            self.keep(adapter, image)

    def seconds_left(self, adapter: Adapter) -> float:
        """How long, by what reads have taken so far, until the rest of an adapter that is being read is here."""
        left = 1 - max(0, self._images.peek(adapter).stream.num_ready) / adapter.layout.num_layers
        return left * adapter.num_pages * self._costs.disk_adapter_page

    def _size(self, adapter: Adapter) -> int:
        return adapter.num_pages * self._page_bytes


def _may_drop(adapter: Adapter) -> bool:
    """True if a host image may make room: nobody holds the version, or its pages can be saved in time."""
    return adapter.requests == 0 or (bool(adapter.pages) and adapter.transfer is None)
