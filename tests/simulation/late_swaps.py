"""Copies of swapped KV that are made later than they are asked for, in any order, or fail."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

from chorus.memory.transfers.swap_backend import CopyMode, SwapBackend

LOOKS = (0, 1, 1, 3, 20)
"""Times that a copy is looked at before it is made, drawn for each."""
FAILING = 0.1
WAIT = 2e-4


class LateCopy:
    """A copy that is made when it has been looked at often enough; once cancelled it never is, but takes as long."""

    address = 0

    def __init__(self, make: Callable[[], None], looks: int, fails: bool) -> None:
        self._make = make
        self._looks = looks
        self._fails = fails
        self._is_cancelled = self._is_done = False

    def wait_layer(self, layer: int, timeout: float) -> bool:
        return self.is_done()

    def is_done(self) -> bool:
        if not self.is_quiet() or self._is_done or self.has_failed():
            return self._is_done
        self._make()
        self._is_done = True
        return True

    def has_failed(self) -> bool:
        return self._is_cancelled or (self._fails and self._looks < 0)

    def cancel(self) -> None:
        self._is_cancelled = not self._is_done

    def is_quiet(self) -> bool:
        self._looks -= 1
        return self._looks < 0


class LateSwaps:
    """Another backend's copies, late."""

    def __init__(self, swaps: SwapBackend, draw: random.Random) -> None:
        self.page_seconds = swaps.page_seconds
        self.copying = CopyMode.BACKGROUND
        self._swaps = swaps
        self._draw = draw

    def copy_out(self, pages: Sequence[int], *, ahead: bool = False) -> tuple[Any, LateCopy | None]:
        image: list[Any] = []
        pages = list(pages)
        return image, self._late(lambda: image.append(self._swaps.copy_out(pages)[0]))

    def copy_in(self, image: Any, skip: int, pages: Sequence[int]) -> LateCopy | None:
        pages = list(pages)
        return self._late(lambda: self._bring(image, skip, pages))

    def new_image(self) -> list[Any]:
        return [self._swaps.new_image()]

    def bytes_of(self, image: list[Any]) -> memoryview:
        return self._swaps.bytes_of(image[0])

    def wait(self, timeout: float) -> None:
        time.sleep(min(timeout, WAIT))

    def _bring(self, image: Any, skip: int, pages: Sequence[int]) -> None:
        self._swaps.copy_in(image[0], skip, pages)

    def _late(self, make: Callable[[], None]) -> LateCopy:
        return LateCopy(make, self._draw.choice(LOOKS), self._draw.random() < FAILING)
