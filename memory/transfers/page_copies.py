"""Copies of cached pages, page by page: each has an image of its own, so that each can be dropped alone.

Tests: tests/memory/transfers/test_page_copies.py
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from .swap_backend import CopyMode, SwapBackend
from .transfer import ExecutorLost, Transfer

logger = logging.getLogger(__name__)

STEP_BYTES = 16 << 20
"""Bytes that the thread of steps copies at once: some milliseconds. The rest follows between later steps."""


class PageByPage(Transfer, ABC):
    """Copies pages one by one. The owner asks `is_done` once per step, which copies some more."""

    def __init__(self, backend: SwapBackend, pages: Sequence[int], most: float) -> None:
        """most: pages that are begun at once. Raises the backend's errors; then no copy is running."""
        self._backend = backend
        self.pages = pages
        self._most = most
        self._num_begun = 0
        self._under_way: list[Transfer] = []
        self._is_cancelled = False
        try:
            self._advance()
        except ExecutorLost:
            raise
        except Exception:
            if self.is_quiet():
                raise
            logger.exception("a copy of cached pages failed")  # the owner waits until the others are quiet

    @property
    def address(self) -> int:
        """0: layers are not counted."""
        return 0

    @abstractmethod
    def _begin(self, at: int) -> Transfer | None:
        """Begin to copy a page by its index; None if that is already done."""

    def _advance(self) -> None:
        end = min(len(self.pages), self._num_begun + self._most)
        try:
            while self._num_begun < end:
                transfer = self._begin(self._num_begun)
                self._num_begun += 1
                if transfer is not None:
                    self._under_way.append(transfer)
        except BaseException:
            self.cancel()
            raise

    def wait_layer(self, layer: int, timeout: float) -> bool:
        return self.is_done()

    def is_done(self) -> bool:
        """Copy some more; True once every page is there. Raises the backend's errors."""
        if self._is_cancelled:
            return False
        if self._num_begun < len(self.pages):
            self._advance()
        if any(each.has_failed() for each in self._under_way):
            return False
        self._under_way = [each for each in self._under_way if not each.is_done()]
        return not self._under_way and self._num_begun == len(self.pages)

    @property
    def is_complete(self) -> bool:
        """True if every page is there, without copying any more."""
        return self._num_begun == len(self.pages) and not self._under_way and not self._is_cancelled

    def has_failed(self) -> bool:
        return self._is_cancelled or any(each.has_failed() for each in self._under_way)

    def cancel(self) -> None:
        self._is_cancelled = True
        for each in self._under_way:
            each.cancel()

    def is_quiet(self) -> bool:
        self._under_way = [each for each in self._under_way if not each.is_quiet()]
        return not self._under_way


class PageFetch(PageByPage):
    """Copies images, each of one page, into pages. A device's copies all begin at once, on side streams."""

    def __init__(self, backend: SwapBackend, images: Sequence[Any], pages: Sequence[int], page_bytes: int) -> None:
        """Raises the backend's errors; then no copy is running."""
        self._images = images
        is_now = backend.copying is CopyMode.AT_ONCE
        super().__init__(backend, pages, max(1, STEP_BYTES // page_bytes) if is_now else math.inf)

    def _begin(self, at: int) -> Transfer | None:
        return self._backend.copy_in(self._images[at], 0, self.pages[at : at + 1])


class PageSave(PageByPage):
    """Copies pages into images that nobody waits for."""

    def __init__(self, backend: SwapBackend, pages: Sequence[int], most: int) -> None:
        """most: pages that are begun at once. Raises the backend's errors; then no copy is running."""
        self.images: list[Any] = []
        """Of each page that was begun."""
        super().__init__(backend, pages, most)

    def _begin(self, at: int) -> Transfer | None:
        image, transfer = self._backend.copy_out(self.pages[at : at + 1], ahead=True)
        self.images.append(image)
        return transfer
