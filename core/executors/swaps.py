"""Swaps: copies of KV pages between an executor's arena and host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from statistics import median

import torch

from ...memory.pages.arena import Arena
from ...memory.transfers.dma import Dma
from ...memory.transfers.swap_backend import CopyMode
from ...memory.transfers.transfer import Transfer

_PROBE_PAGES = 16
_PROBES = 5
_LOOK_SECONDS = 5e-4


class PageSwaps:
    """Copies pages with the engine that copies adapters, into buffers of the same kind.

    On a CPU the copies are complete when they return: a thread would gain nothing. With several ranks, `dma` copies the
    pages of all ranks. scope: context in which copies to the arena's device are issued.
    """

    def __init__(self, arena: Arena, dma: Dma, scope: Callable[[], AbstractContextManager[None]] = nullcontext) -> None:
        self._dma = dma
        self._scope = scope
        self._page_elems = arena.layout.page_elems
        self._dtype = arena.pages.dtype
        if dma.copies.is_background:
            self.copying = CopyMode.BACKGROUND
        else:
            self.copying = CopyMode.WAITED if arena.pages.is_cuda else CopyMode.AT_ONCE
        self.page_seconds = self._measure(arena.num_pages)

    def copy_out(self, pages: Sequence[int], *, ahead: bool = False) -> tuple[torch.Tensor, Transfer | None]:
        """Copy pages out; raises MemoryError if the system grants no host memory."""
        with self._scope():
            image = self._dma.buffers.take_now((len(pages), self._page_elems), self._dtype)
            return image, _rest(self._dma.copies.copy_pages(image, pages, to_device=False, ahead=ahead))

    def new_image(self) -> torch.Tensor:
        """Return an uninitialized image of a page; from any thread. Raises MemoryError."""
        return self._dma.buffers.take((1, self._page_elems), self._dtype)

    def bytes_of(self, image: torch.Tensor) -> memoryview:
        """Return the bytes of an image, to read or to change."""
        return image.view(torch.uint8).numpy().data.cast("B")

    def copy_in(self, image: torch.Tensor, skip: int, pages: Sequence[int]) -> Transfer | None:
        with self._scope():
            return _rest(self._dma.copies.copy_pages(image[..., skip:, :], pages, to_device=True))

    def wait(self, timeout: float) -> None:
        """Sleep briefly before the next poll: the host gets no signal when a device's copy has ended."""
        time.sleep(min(timeout, _LOOK_SECONDS))

    def _measure(self, num_pages: int) -> float:
        """Seconds to copy a page out and back: the median of a few copies of unused pages."""
        pages = range(min(_PROBE_PAGES, num_pages))
        seconds = []
        for _ in range(_PROBES):
            began = time.perf_counter()
            image, leaving = self.copy_out(pages)
            _finish(leaving)
            _finish(self.copy_in(image, 0, pages))
            seconds.append((time.perf_counter() - began) / len(pages))
        return median(seconds)


def _rest(transfer: Transfer) -> Transfer | None:
    """Return the transfer if it must still be waited for."""
    return None if transfer.is_done() else transfer


def _finish(transfer: Transfer | None) -> None:
    while transfer is not None and not transfer.is_quiet():
        time.sleep(0)
