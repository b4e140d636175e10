"""Copies by the host. Those of large adapters go on in the background, so that steps of others don't wait for them; any
other is complete when the call returns.

Tests: tests/memory/transfers/test_host_copies.py, tests/memory/transfers/test_dma.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from ..host.daemon_pool import DaemonPool, ask_for_short_slices
from ..host.image import HostImage, LayerStream
from ..pages.adapter_layout import AdapterLayout
from .transfer import check_image, check_pages

STEP_BYTES = 16 << 20
"""Bytes, or one layer if that is more, that the thread of steps copies of an adapter: some milliseconds."""

COPY_SECONDS = 1.0
"""The most seconds that a step waits for a layer that has been read and not yet copied: far more than that takes."""

_background = DaemonPool("adapter-copy", 1, math.inf, initializer=ask_for_short_slices)


class HostCopies:
    """Copy engine for an arena on the CPU. On a GPU it is the fallback without CuPy, and slower because the host waits.

    pages: the arena, `[num_pages, page_elems]`.
    """

    is_background = False

    def __init__(self, pages: torch.Tensor) -> None:
        self._pages = pages
        # The integer view of a CPU's arena is made once: each call into torch releases the GIL, which delays the start
        # of a step.
        self._target: Any = pages if pages.is_cuda else bits_of(pages)

    def start(self, image: HostImage, layout: AdapterLayout, pages: Sequence[int]) -> HostTransfer:
        """Load the part of an image that has been read, beyond `STEP_BYTES` in the background; the reading thread
        copies the rest as it comes.
        """
        check_pages(pages, layout.num_pages, len(self._target))
        if self._pages.is_cuda:  # the pages' former owner may still use them
            torch.cuda.current_stream(self._pages.device).synchronize()
        return HostTransfer(self, image, layout, pages, step_bytes=STEP_BYTES)

    def copy_out(self, pages: Sequence[int], image: torch.Tensor) -> None:
        check_image(image, len(pages), self._pages)
        if self._pages.is_cuda:
            image.copy_(self._pages[list(pages)])
        else:
            # without a mode numpy would copy twice
            np.take(self._target, pages, axis=0, out=bits_of(image), mode="clip")

    def copy_in(self, image: torch.Tensor, ranges: Sequence[tuple[int, int]], pages: Sequence[int]) -> None:
        """Copy runs of elements `begin … end` of an image into its pages. Raises ValueError for another shape."""
        check_image(image, len(pages), self._pages)
        source = image.view(-1) if self._pages.is_cuda else bits_of(image).reshape(-1)
        target, page_elems = self._target, self._target.shape[1]
        for begin, end in ranges:
            while begin < end:
                index, at = divmod(begin, page_elems)
                count = min(end - begin, page_elems - at)
                target[pages[index], at : at + count] = source[begin : begin + count]
                begin += count

    def copy_pages(
        self, image: torch.Tensor, pages: Sequence[int], *, to_device: bool, ahead: bool = False
    ) -> CompleteTransfer:
        """Move whole pages into the arena or out of it, complete when this returns."""
        check_pages(pages, len(pages), len(self._target))
        if not to_device:
            self.copy_out(pages, image)
            return CompleteTransfer()
        check_image(image, len(pages), self._pages)
        if self._pages.is_cuda:  # on the compute stream, and so after all work launched before
            self._pages[list(pages)] = image.to(self._pages.device)
        else:
            source = bits_of(image)
            for row, page in enumerate(pages):
                self._target[page] = source[row]
        return CompleteTransfer()

    def advance(self) -> None:
        """Does nothing: readers issue copies as layers come."""

    def close(self) -> None:
        """Does nothing: no copy is running, and no more begin once the reads have ended."""


class LayerCopies(Protocol):
    """Copies runs of elements of an image's data into its pages; see `HostCopies.copy_in`."""

    def copy_in(self, image: Any, ranges: Sequence[tuple[int, int]], pages: Sequence[int], /) -> None: ...


class CompleteTransfer:
    """A transfer that was complete from the start."""

    address = 0

    def wait_layer(self, layer: int, timeout: float = 0.0) -> bool:
        return True

    def is_done(self) -> bool:
        return True

    def has_failed(self) -> bool:
        return False

    def cancel(self) -> None:
        """Does nothing: the transfer is complete."""

    def is_quiet(self) -> bool:
        return True


class HostTransfer:
    """Copies layers as soon as they are read, on the reading thread; `arrived` counts the layers in the pages."""

    def __init__(
        self,
        engine: LayerCopies,
        image: HostImage,
        layout: AdapterLayout,
        pages: Sequence[int],
        arrived: LayerStream | None = None,
        *,
        step_bytes: float = math.inf,
    ) -> None:
        """step_bytes: that are copied here and now; more that has been read is copied in the background."""
        self.arrived = LayerStream() if arrived is None else arrived
        self._engine = engine
        self._image: HostImage | None = image  # None once there is nothing more to copy
        self._layout = layout
        self._pages = pages
        self._lock = threading.Lock()
        self._copied = 0
        image.follow(self.advance)
        if self._copy_some(step_bytes):
            _background.submit(self.advance)

    @property
    def address(self) -> int:
        return self.arrived.address

    def advance(self) -> None:
        """Copy the layers that have been read; thread-safe. If a copy fails, so does the transfer; raises its error."""
        while self._copy_some(STEP_BYTES):
            pass

    def _copy_some(self, most_bytes: float) -> bool:
        """Copy layers that have been read, of so many bytes or one; return True if there are more of them."""
        with self._lock:
            image = self._image
            if image is None:
                return False
            ready, data = image.stream.num_ready, image.data
            if ready == LayerStream.FAILED or (ready > self._copied and data is None):  # it failed just now
                self.arrived.fail()
                self._let_go()
                return False
            if ready > self._copied:
                end = self._copied + 1
                while end < ready and self._bytes(data, range(self._copied, end + 1)) <= most_bytes:
                    end += 1
                try:
                    self._engine.copy_in(data, self._layout.ranges(range(self._copied, end)), self._pages)
                except BaseException:
                    self.arrived.fail()
                    self._let_go()
                    raise
                self._copied = end
                self.arrived.publish(end)
            if self.is_done():
                self._let_go()
            return self._copied < ready

    def _bytes(self, data: Any, layers: range) -> int:
        return data.itemsize * sum(end - begin for begin, end in self._layout.ranges(layers))

    def wait_layer(self, layer: int, timeout: float = 0.0) -> bool:
        """Sleep until `layer` is in its pages; return whether it is. timeout: the most seconds for its read."""
        image = self._image
        if image is not None and image.stream.num_ready > layer:
            timeout = max(timeout, COPY_SECONDS)
        return self.arrived.wait(layer, timeout)

    def is_done(self) -> bool:
        return self.arrived.num_ready == self._layout.num_layers

    def has_failed(self) -> bool:
        return self.arrived.num_ready == LayerStream.FAILED

    def cancel(self) -> None:
        """Stop; once this has returned, nothing is written to the pages."""
        with self._lock:
            self._let_go()

    def is_quiet(self) -> bool:
        """True after `cancel`, which waits for a running copy."""
        return self._image is None

    def _let_go(self) -> None:
        """Drop the references between image and transfer; the caller holds the lock."""
        if self._image is not None:
            self._image.unfollow(self.advance)
            self._image = None


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    """View the same memory as integers: torch may split a copy among threads that the step needs."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.itemsize]).numpy()
