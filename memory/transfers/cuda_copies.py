"""Copies that run beside compute, on streams of their own.

Why each step sees the right bytes. A stream runs its work in order; an event recorded on a stream fires after all work
enqueued before it; a stream that waits for an event runs work enqueued later after the event.

- *A layer's bytes are there when compute reads them.* An event is recorded on the copy stream after the group's copies,
  and `join` makes the compute stream wait for it before the caller launches what reads them. When the host has already
  seen the event fire, the copies are complete, and whatever is launched later comes after them.
- *The former owner is done with the pages when a copy writes them.* `fence` records an event on the compute stream, on
  the thread that launches compute, when the pages change hands; everything that the former owner launched comes before
  it, and every copy of the transfer after it, also copies that a reader's thread issues later. Copies out of the arena
  wait for the same event, and so read what compute has written.
- *The former owner's own copies are done too:* its pages come back only when its transfer is quiet, which is when the
  host has seen the event after its last copy fire.
- *A host image is not reused while a copy reads it:* the engine holds the transfer, and that the image, until then.
- *The host's writes come before the copy that reads them:* a layer is published after it is written, under a lock, and
  issued after it is seen published.

Only `fence` and `join` ask for the current compute stream, which is a property of the calling thread; a reader's thread
issues copies but does neither. A step that is being captured into a graph must not wait for transfers: their events
belong to no capture.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import torch

from ..host.image import HostImage
from ..pages.adapter_layout import AdapterLayout
from .cuda_driver import CupyDriver
from .cuda_transfer import LAYERS_AHEAD, CopyGroup, CopyPlan, CudaTransfer
from .transfer import check_image, check_pages

#: A group of layers shares an event once it has this many bytes: about 40 µs of a PCIe 5 link.
GROUP_BYTES = 2 << 20


class CudaCopies:
    """Copy engine of a GPU: one copy stream each way, so that swapping out does not queue behind loading.

    pages: the arena, `[num_pages, page_elems]` on the device. An image in memory that is not pinned is copied rightly,
    but the host waits for it. group_bytes: bytes after which a group of layers is closed; the first layer is always a
    group of its own, and no layer is cut.
    """

    def __init__(self, pages: torch.Tensor, driver: CupyDriver, group_bytes: int = GROUP_BYTES) -> None:
        self._pages = pages
        self._num_pages, self._page_elems = pages.shape
        self._itemsize = pages.itemsize
        self._group_elems = group_bytes // pages.itemsize
        self._driver = driver
        #: Handles of the copy streams, by direction: to the device or not.
        self.streams = {True: driver.new_stream(), False: driver.new_stream()}
        self._live: list[CudaTransfer] = []
        #: Guards all issuing, so that copies enter a stream in one order; no one sleeps while holding it.
        self.lock = threading.RLock()

    def start(self, image: HostImage, layout: AdapterLayout, pages: Sequence[int]) -> CudaTransfer:
        """Issue what has been read of the first group and LAYERS_AHEAD layers more, so that the link has work until the
        step begins; `advance`, the prefill and the reading thread issue the others.
        """
        check_pages(pages, layout.num_pages, self._num_pages)
        plan = CopyPlan.of_layers(layout, pages, self._page_elems, self._group_elems)
        return self._start(image, plan, len(pages), to_device=True)

    def copy_out(self, pages: Sequence[int], image: torch.Tensor) -> None:
        self.copy_pages(image, pages, to_device=False).synchronize()

    def copy_pages(self, image: torch.Tensor, pages: Sequence[int], *, to_device: bool) -> CudaTransfer:
        """Begin to move whole pages, such as a swapped-out request's KV, into the arena or out of it.

        image: `[len(pages), page_elems]` on the host. The current compute stream's work so far comes first. All copies
        are issued before this returns. Bytes moved to the host may be read once `is_done()`; after `wait()` the pages
        may have a new owner, if its work follows on the compute stream.
        """
        check_pages(pages, len(pages), self._num_pages)
        plan = CopyPlan.of_pages(pages, self._page_elems, self._group_elems)
        holder = HostImage()
        holder.data = image
        holder.publish(len(pages))
        transfer = self._start(holder, plan, len(pages), to_device)
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

    def close(self) -> None:
        """Cancel every transfer and wait until their copies are complete. The arena may be freed after that."""
        with self.lock:
            live, self._live = self._live, []
        for transfer in live:
            transfer.cancel()
            transfer.synchronize()
            transfer.is_quiet()

    def _start(self, image: HostImage, plan: CopyPlan, num_pages: int, to_device: bool) -> CudaTransfer:
        transfer = CudaTransfer(self, image, plan, num_pages, to_device)
        with self.lock:
            self.fence(to_device)
            image.follow(transfer.advance)
            if group := transfer.next_group():
                try:
                    transfer.advance(group.first_layer + LAYERS_AHEAD)
                except BaseException:
                    transfer.synchronize()  # no copy is running when the caller hears of it
                    raise
            self._live.append(transfer)
        return transfer

    # -- for transfers; called with the lock held, but for `synchronize`

    def check_image(self, image: torch.Tensor, num_pages: int) -> None:
        """ValueError unless `image` is `[num_pages, page_elems]` of the arena's dtype."""
        check_image(image, num_pages, self._pages)

    def fence(self, to_device: bool) -> None:
        """Let copies issued from now on begin after what the current compute stream was given so far."""
        event = self._driver.new_event()
        self._driver.record(event, self._driver.compute_stream())
        self._driver.wait_event(self.streams[to_device], event)

    def issue(self, image: torch.Tensor, group: CopyGroup, to_device: bool) -> Any:
        """Start a group's copies; returns their event. When it raises, none of them is running."""
        stream, event = self.streams[to_device], self._driver.new_event()
        try:
            for run in group.runs:
                host = image.data_ptr() + run.image_elem * self._itemsize
                arena = self._pages.data_ptr() + run.arena_elem * self._itemsize
                target, source = (arena, host) if to_device else (host, arena)
                self._driver.memcpy_async(target, source, run.num_elems * self._itemsize, to_device, stream)
            self._driver.record(event, stream)
        except BaseException:
            self._driver.record(event, stream)
            self._driver.synchronize(event)
            raise
        return event

    def is_fired(self, event: Any) -> bool:
        """True if the copies before `event` are complete; does not wait."""
        return self._driver.query(event)

    def join(self, event: Any) -> None:
        """Let what the current compute stream is given from now on begin after `event`; the host does not wait."""
        self._driver.wait_event(self._driver.compute_stream(), event)

    def synchronize(self, event: Any) -> None:
        """Let the host wait for `event`."""
        self._driver.synchronize(event)
