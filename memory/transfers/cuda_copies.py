"""Copies on their own streams, which overlap with compute.

Three rules of CUDA make every step see the right bytes. A stream runs its work in order. An event recorded on a stream
fires after all work enqueued before it. A stream that waits for an event runs work enqueued later after the event.

- *A layer's bytes are present when compute reads them.* An event is recorded on the copy stream after the group's
  copies. `join` makes the compute stream wait for it before the caller launches the layer. If the host has already
  seen the event fire, the copies are complete, and anything launched later runs after them.

- *The former owner is done with the pages when a copy writes them.* When the pages change hands, `fence` records an
  event on the compute stream, on the thread that launches compute. All work launched by the former owner precedes the
  event. Every copy of the transfer follows it, including copies that a reader's thread issues later. Copies out of
  the arena wait for the same event, so they read the values that compute has written.

- *The former owner's own copies are also done.* Its pages are freed only when its transfer is quiet: when the host has
  seen the event after its last copy fire.

- *A host image is not reused while a copy reads it.* The engine holds the transfer until then, and the transfer holds
  the image.

- *A pinned block of `Staging` is not written while a copy reads it.* Its thread waits for the event of the block's last
  copies before it fills the block again, and copies that go out are complete when it reads the block.

- *The host's writes come before the copy that reads them.* A layer is published after it is written, under a lock, and
  its copy is issued after it is seen published.

Only `fence` and `join` use the current compute stream, which is a property of the calling thread. A reader's thread
issues copies but calls neither. A step must not wait for transfers while it is being captured into a graph, because
their events belong to no capture.

Tests: tests/memory/transfers/test_dma.py, tests/memory/transfers/test_dma_streams.py
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..host.image import HostImage
from ..pages.adapter_layout import AdapterLayout
from .copy_plan import CopyGroup, CopyPlan
from .cuda_driver import CupyDriver
from .cuda_transfer import LAYERS_AHEAD, CudaTransfer
from .staging import Staging
from .transfer import check_image, check_pages

#: The most copies that a stream holds before more are issued. A stream that is full, at about 1,000, makes the host
#: wait, and each copy takes the host a microsecond or two: a load in scattered pages may have many hundreds.
MOST_QUEUED = 256

#: A group of layers that share an event is closed at this many bytes: about 40 µs of a PCIe 5 link.
GROUP_BYTES = 2 << 20


class CudaCopies:
    """Copy engine of a GPU, with one copy stream per direction, so that swapping out does not queue after loading.

    pages: the arena, `[num_pages, page_elems]` on the device. group_bytes: size at which a group of layers is closed.
    The first layer is always its own group, and no layer is split. staging: copies images in memory that is not pinned;
    without it they are copied correctly, but the host waits for the copy.
    """

    def __init__(
        self,
        pages: torch.Tensor,
        driver: CupyDriver,
        group_bytes: int = GROUP_BYTES,
        staging: Staging | None = None,
    ) -> None:
        self._pages = pages
        self._num_pages, self._page_elems = pages.shape
        self._itemsize = pages.itemsize
        self._group_elems = group_bytes // pages.itemsize
        self._driver = driver
        #: Handles of the copy streams; True: to the device.
        self.streams = {True: driver.new_stream(), False: driver.new_stream()}
        self._live: list[CudaTransfer] = []
        #: Events of the groups that were issued, with the number of their copies; those that have fired leave first.
        self._queued: dict[bool, deque[tuple[Any, int]]] = {True: deque(), False: deque()}
        self._num_queued = {True: 0, False: 0}
        #: Guards all issuing, so copies enter a stream in one order. No thread sleeps while holding it.
        self.lock = threading.RLock()
        self._staging = staging
        if staging is not None:
            staging.join(self)

    @property
    def is_background(self) -> bool:
        """False without staging: the host would wait for copies of ordinary memory."""
        return self._staging is not None

    def start(self, image: HostImage, layout: AdapterLayout, pages: Sequence[int]) -> CudaTransfer:
        """Issue the layers read so far, up to LAYERS_AHEAD after the first group, so the link has work until the step
        begins.

        `advance`, the prefill and the reading thread issue the other layers.
        """
        check_pages(pages, layout.num_pages, self._num_pages)
        plan = CopyPlan.of_layers(layout, pages, self._page_elems, self._group_elems)
        return self._start(image, plan, len(pages), to_device=True)

    def copy_out(self, pages: Sequence[int], image: torch.Tensor) -> None:
        transfer = self.copy_pages(image, pages, to_device=False)
        transfer.synchronize()
        if transfer.has_failed():
            raise RuntimeError(f"{len(pages)} pages could not be copied to ordinary memory")

    def copy_pages(
        self, image: torch.Tensor, pages: Sequence[int], *, to_device: bool, ahead: bool = False
    ) -> CudaTransfer:
        """Begin to move whole pages, such as a swapped-out request's KV, into the arena or out of it.

        image: `[len(pages), page_elems]` on the host. The copies run after the work launched so far on the current
        compute stream; those that the stream has no room for are issued later. Bytes moved to the host may be read once
        `is_done()`. After `wait()` the pages may have a new owner, if its work follows on the compute stream. ahead:
        nobody waits for it, so that `Staging` copies it after all others.
        """
        check_pages(pages, len(pages), self._num_pages)
        plan = CopyPlan.of_pages(pages, self._page_elems, self._group_elems)
        holder = HostImage()
        holder.data = image
        holder.publish(len(pages))
        transfer = self._start(holder, plan, len(pages), to_device, ahead=ahead)
        try:
            transfer.advance()
        except BaseException:
            transfer.synchronize()  # the caller gets no transfer that would tell when the earlier copies are complete
            raise
        return transfer

    def advance(self) -> None:
        """Issue every copy that has room, lowest layers of all transfers first; drop transfers that have ended."""
        with self.lock:
            self._live = [transfer for transfer in self._live if not transfer.is_quiet()]
            while ready := self._ready():
                lowest = min(layer for _, layer in ready)
                for transfer, _ in ready:
                    transfer.advance(lowest)

    def _ready(self) -> list[tuple[CudaTransfer, int]]:
        """Return the transfers with a group that may be issued and has room, and that group's first layer."""
        groups = [(transfer, transfer.next_group()) for transfer in self._live]
        found = [(it, group) for it, group in groups if group is not None]
        if any(it.is_staged for it, _ in found):
            self.wake_staging()
        return [(it, group.first_layer) for it, group in found if not it.is_staged and it.has_room(group)]

    def close(self) -> None:
        """Cancel every transfer and wait until their copies are complete. The arena may be freed after that."""
        with self.lock:
            live, self._live = self._live, []
        for transfer in live:
            transfer.cancel()
            transfer.synchronize()
            transfer.is_quiet()
        if self._staging is not None:
            self._staging.close()

    def _start(
        self, image: HostImage, plan: CopyPlan, num_pages: int, to_device: bool, *, ahead: bool = False
    ) -> CudaTransfer:
        transfer = CudaTransfer(self, image, plan, num_pages, to_device, is_ahead=ahead)
        with self.lock:
            self.fence(to_device)
            image.follow(transfer.advance)
            if group := transfer.next_group():
                try:
                    transfer.advance(group.first_layer + LAYERS_AHEAD)
                except BaseException:
                    transfer.synchronize()  # no copy is running when the caller sees the error
                    raise
            self._live.append(transfer)
        return transfer

    # -- called by transfers and staging, with the lock held unless they wait

    def is_staged(self, image: torch.Tensor) -> bool:
        """True if an image is copied through pinned memory."""
        return self._staging is not None and self._staging.is_ordinary(image)

    def staged(self) -> list[CudaTransfer]:
        """The transfers whose copies `Staging` issues."""
        return [transfer for transfer in self._live if transfer.is_staged]

    def wake_staging(self) -> None:
        """See `Staging.wake`."""
        if self._staging is not None:
            self._staging.wake()

    def wait_for_staging(self, is_true: Callable[[], bool], timeout: float | None = None) -> bool:
        """See `Staging.wait_for`."""
        return is_true() if self._staging is None else self._staging.wait_for(is_true, timeout)

    def check_image(self, image: torch.Tensor, num_pages: int) -> None:
        """Raise ValueError unless `image` is `[num_pages, page_elems]` with the arena's dtype."""
        check_image(image, num_pages, self._pages)

    def fence(self, to_device: bool) -> None:
        """Make copies issued from now on wait for all work launched so far on the current compute stream."""
        event = self._driver.new_event()
        self._driver.record(event, self._driver.compute_stream())
        self._driver.wait_event(self.streams[to_device], event)

    def has_room(self, group: CopyGroup, to_device: bool) -> bool:
        """True if a group's copies may be issued without filling the stream; always, if it is idle."""
        queued = self._queued[to_device]
        while queued and self._driver.query(queued[0][0]):
            self._num_queued[to_device] -= queued.popleft()[1]
        return not queued or self._num_queued[to_device] + len(group.runs) <= MOST_QUEUED

    def wait_for_room(self, to_device: bool) -> None:
        """Make the host wait until the stream has done the oldest group that it was given."""
        with self.lock:
            events = [event for event, _ in self._queued[to_device]][:1]
        for event in events:
            self._driver.synchronize(event)

    def issue(self, image: torch.Tensor, group: CopyGroup, to_device: bool) -> Any:
        """Start a group's copies and return their event. If it raises, none of them is running."""
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
        self._queued[to_device].append((event, len(group.runs)))
        self._num_queued[to_device] += len(group.runs)
        return event

    def is_fired(self, event: Any) -> bool:
        """True if the copies before `event` are complete, without waiting."""
        return self._driver.query(event)

    def join(self, event: Any) -> None:
        """Make work launched from now on on the current compute stream wait for `event`; the host does not wait."""
        self._driver.wait_event(self._driver.compute_stream(), event)

    def synchronize(self, event: Any) -> None:
        """Make the host wait for `event`."""
        self._driver.synchronize(event)
