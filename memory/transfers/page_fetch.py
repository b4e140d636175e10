"""The copy of cached pages from their host images back into the pool."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from .swap_backend import SwapBackend
from .transfer import Transfer

STEP_BYTES = 16 << 20
"""Bytes that the thread of steps copies at once: some milliseconds. The rest follows between later steps."""


class PageFetch(Transfer):
    """Copies images, each of one page, into pages. The owner asks `is_done` once per step, which copies some more.

    A device's copies all begin at once, on side streams.
    """

    def __init__(self, backend: SwapBackend, images: Sequence[Any], pages: Sequence[int], page_bytes: int) -> None:
        """Raises the backend's errors."""
        self._backend = backend
        self._images, self._pages = images, pages
        self._num_begun = 0
        self._most = max(1, STEP_BYTES // page_bytes) if backend.copies_at_once else math.inf
        self._under_way: list[Transfer] = []
        self._is_cancelled = False
        self._advance()

    @property
    def address(self) -> int:
        """0: layers are not counted."""
        return 0

    def _advance(self) -> None:
        end = min(len(self._pages), self._num_begun + self._most)
        while self._num_begun < end:
            at = self._num_begun
            transfer = self._backend.copy_in(self._images[at], 0, self._pages[at : at + 1])
            self._num_begun += 1
            if transfer is not None:
                self._under_way.append(transfer)

    def wait_layer(self, layer: int, timeout: float) -> bool:
        return self.is_done()

    def is_done(self) -> bool:
        """Copy some more; True once every page is there. Raises the backend's errors."""
        if self._is_cancelled:
            return False
        if self._num_begun < len(self._pages):
            self._advance()
        if any(each.has_failed() for each in self._under_way):
            return False
        self._under_way = [each for each in self._under_way if not each.is_done()]
        return not self._under_way and self._num_begun == len(self._pages)

    @property
    def is_complete(self) -> bool:
        """True if every page is there, without copying any more."""
        return self._num_begun == len(self._pages) and not self._under_way and not self._is_cancelled

    def has_failed(self) -> bool:
        return self._is_cancelled or any(each.has_failed() for each in self._under_way)

    def cancel(self) -> None:
        self._is_cancelled = True
        for each in self._under_way:
            each.cancel()

    def is_quiet(self) -> bool:
        self._under_way = [each for each in self._under_way if not each.is_quiet()]
        return not self._under_way
