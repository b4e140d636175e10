"""Copy engines, which move images between the host and the arena."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from ..host.image import HostImage
from ..pages.adapter_layout import AdapterLayout
from .copy_plan import CopyGroup, CopyPlan
from .transfer import Transfer

#: A group of layers shares an event once it has this many bytes: about 40 µs of a PCIe 5 link.
GROUP_BYTES = 2 << 20


class CopyEngine(ABC):
    """Starts transfers and drives them; call `advance()` once a step.

    num_pages, page_elems, itemsize: the arena's shape. group_bytes: bytes after which a group of layers is closed; the
    first layer is always a group of its own, and no layer is cut.
    """

    def __init__(self, num_pages: int, page_elems: int, itemsize: int, group_bytes: int = GROUP_BYTES) -> None:
        self.num_pages = num_pages
        self.page_elems = page_elems
        self.itemsize = itemsize
        self._group_elems = group_bytes // itemsize
        self._live: list[Transfer] = []
        #: Guards all issuing, so that copies enter a stream in one order; no one sleeps while holding it.
        self.lock = threading.RLock()

    def start(self, image: HostImage, layout: AdapterLayout, pages: Sequence[int]) -> Transfer:
        """Begin to load an adapter into `pages` (arena page per page of the layout) and issue its first group.

        image: its data is `[layout.num_pages, page_elems]` on the host; while it is still being read, the thread that
        reads it issues each layer as it comes. Copies begin after whatever the current compute stream was given so far:
        it may still use the pages for their former owner. Call it from the thread that launches compute.
        """
        if len(pages) != layout.num_pages:
            raise ValueError(f"the adapter has {layout.num_pages} pages, {len(pages)} pages of the arena were given")
        plan = CopyPlan.of_layers(layout, pages, self.page_elems, self._group_elems)
        return self._start(image, plan, pages, to_device=True)

    def copy_pages(self, image: Any, pages: Sequence[int], *, to_device: bool) -> Transfer:
        """Begin to move whole pages, such as a swapped-out request's KV, into the arena or out of it.

        image: `[len(pages), page_elems]` on the host. The current compute stream's work so far comes first. All copies
        are issued before this returns. Bytes moved to the host may be read once `is_done()`; after `wait()` the pages
        may have a new owner whose work follows on the compute stream.
        """
        plan = CopyPlan.of_pages(pages, self.page_elems, self._group_elems)
        holder = HostImage()
        holder.data = image
        holder.publish(len(pages))
        transfer = self._start(holder, plan, pages, to_device)
        try:
            transfer.advance()
        except BaseException:
            transfer.synchronize()  # the caller gets no transfer to ask whether the copies before it are complete
            raise
        return transfer

    def advance(self) -> None:
        """Issue whatever can be issued, the lowest layers of all transfers first; let go of transfers that ended."""
        with self.lock:
            self._live = [transfer for transfer in self._live if not transfer.is_quiet()]
            while ready := [(t, group.first_layer) for t in self._live if (group := t.next_group())]:
                lowest = min(layer for _, layer in ready)
                for transfer, _ in ready:
                    transfer.advance(lowest)

    @property
    def num_live(self) -> int:
        """Transfers whose image is still held, as of the last `advance()`."""
        return len(self._live)

    def close(self) -> None:
        """Cancel every transfer and wait until their copies are complete. The arena may be freed after that."""
        with self.lock:
            live, self._live = self._live, []
        for transfer in live:
            transfer.cancel()
            transfer.synchronize()
            transfer.is_quiet()

    def _start(self, image: HostImage, plan: CopyPlan, pages: Sequence[int], to_device: bool) -> Transfer:
        for page in pages:
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} is not one of the arena's {self.num_pages} pages")
        transfer = Transfer(self, image, plan, len(pages), to_device)
        with self.lock:
            self.fence(to_device)
            image.follow(transfer.advance)
            if group := transfer.next_group():
                transfer.advance(group.first_layer)  # when it raises, no copy is running
            self._live.append(transfer)
        return transfer

    # -- what a kind of engine brings; called with the lock held, but for `synchronize`

    @abstractmethod
    def check_image(self, image: Any, num_pages: int) -> None:
        """ValueError unless `image` is `[num_pages, page_elems]` of the arena's dtype."""

    @abstractmethod
    def fence(self, to_device: bool) -> None:
        """Let copies issued from now on begin after what the current compute stream was given so far."""

    @abstractmethod
    def issue(self, image: Any, group: CopyGroup, to_device: bool) -> Any:
        """Start a group's copies; returns their event. When it raises, none of them is running."""

    @abstractmethod
    def is_fired(self, event: Any) -> bool:
        """True if the copies before `event` are complete; does not wait."""

    @abstractmethod
    def join(self, event: Any) -> None:
        """Let what the current compute stream is given from now on begin after `event`; the host does not wait."""

    @abstractmethod
    def synchronize(self, event: Any) -> None:
        """Let the host wait for `event`."""
