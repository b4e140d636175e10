"""Copies that run beside compute, on streams of their own.

Why each step sees the right bytes. A stream runs what it is given in order; an event recorded on a stream fires after
all that the stream was given before; a stream that waits for an event runs what it is given later after the event.

- *A layer's bytes are there when compute reads them.* An event is recorded on the copy stream after the group's copies,
  and `join` makes the compute stream wait for it before the caller launches what reads them. When the host has already
  seen the event fire, the copies are complete, and whatever is launched later comes after them.
- *The former owner is done with the pages when a copy writes them.* `fence` records an event on the compute stream, on
  the thread that launches compute, when the pages change hands; everything that the former owner launched comes before
  it, and every copy of the transfer after it, those that a reader's thread issues later as well. Copies out of the
  arena wait for the same event, and so read what compute has written.
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

from typing import Any

import torch

from .copy_engine import GROUP_BYTES, CopyEngine
from .copy_plan import CopyGroup
from .cuda_driver import CudaDriver
from .image_shape import check_image_shape


class CudaCopies(CopyEngine):
    """One copy stream each way, so that swapping out does not queue behind loading.

    pages: the arena, `[num_pages, page_elems]` on the device. An image in memory that is not pinned is copied rightly,
    but the host waits for it.
    """

    def __init__(self, pages: torch.Tensor, driver: CudaDriver, group_bytes: int = GROUP_BYTES) -> None:
        num_pages, page_elems = pages.shape
        super().__init__(num_pages, page_elems, pages.itemsize, group_bytes)
        self._pages = pages
        self._driver = driver
        self._streams = {True: driver.new_stream(), False: driver.new_stream()}  # by direction: to the device or not

    def check_image(self, image: torch.Tensor, num_pages: int) -> None:
        check_image_shape(image, num_pages, self._pages)

    def fence(self, to_device: bool) -> None:
        event = self._driver.new_event()
        self._driver.record(event, self._driver.compute_stream())
        self._driver.wait_event(self._streams[to_device], event)

    def issue(self, image: torch.Tensor, group: CopyGroup, to_device: bool) -> Any:
        stream, event = self._streams[to_device], self._driver.new_event()
        try:
            for run in group.runs:
                host = image.data_ptr() + run.image_elem * self.itemsize
                arena = self._pages.data_ptr() + run.arena_elem * self.itemsize
                target, source = (arena, host) if to_device else (host, arena)
                self._driver.memcpy_async(target, source, run.num_elems * self.itemsize, to_device, stream)
            self._driver.record(event, stream)
        except BaseException:
            self._driver.record(event, stream)
            self._driver.synchronize(event)
            raise
        return event

    def is_fired(self, event: Any) -> bool:
        return self._driver.query(event)

    def join(self, event: Any) -> None:
        self._driver.wait_event(self._driver.compute_stream(), event)

    def synchronize(self, event: Any) -> None:
        self._driver.synchronize(event)
