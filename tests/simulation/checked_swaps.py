"""KV of preempted requests on its way to host memory and back, in virtual time, on the memory of contents."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from chorus.memory.transfers.swap_backend import CopyMode

from .asked import promise
from .faulty_disk import FileImage, bytes_of
from .made_up_model import Memory
from .virtual_reads import VirtualClock


class CheckedSwaps:
    """Copies of KV pages to host memory and back, in virtual time; some fail, and their results are discarded, and some
    don't begin.
    """

    page_seconds = 1e-4

    def __init__(
        self,
        memory: Memory,
        clock: VirtualClock,
        rng: random.Random,
        reached: Counter[str],
        delay: float = 0.0,
        trouble: float = 0.0,
    ) -> None:
        """delay: typical seconds of a copy; without any it ends at once. trouble: part of the late copies that fail."""
        self._memory = memory
        self._clock = clock
        self._rng = rng
        self._reached = reached
        self._delay = delay
        self._trouble = trouble
        self._num_under_way = 0
        self.copying = CopyMode.BACKGROUND if delay else CopyMode.AT_ONCE
        self._refusals = random.Random(repr(rng.getstate())) if trouble else None
        """What draws copies that do not even begin: a source of its own."""

    def copy_out(self, pages: Sequence[int], *, ahead: bool = False) -> tuple[list[list[object]], SwapCopy | None]:
        image: list[list[object]] = []
        held = list(pages)

        def write() -> None:
            image.extend(self._memory[page].copy() for page in held)

        return image, self._begin(write)

    def copy_in(self, image: list[list[object]], skip: int, pages: Sequence[int]) -> SwapCopy | None:
        promise(len(pages) == len(image) - skip, "KV comes back into more or fewer pages than it had")
        places, contents = [self._memory[page] for page in pages], image[skip:]

        def write() -> None:
            for place, content in zip(places, contents, strict=True):
                place[:] = content

        if self._refusals is not None and self._refusals.random() < 0.2:
            self._reached["a copy that could not begin"] += 1
            raise OSError("a copy could not begin")
        for place in places:
            place[:] = ["not there yet"] * len(place)
        return self._begin(write)

    def new_image(self) -> FileImage:
        return FileImage()

    def bytes_of(self, image: Any) -> memoryview:
        return bytes_of(image)

    def wait(self, timeout: float) -> None:
        self._reached["waited for a copy"] += bool(self._num_under_way)
        end, before = self._clock.now + timeout, self._num_under_way
        while self._num_under_way == before and self._clock.next_time <= end:
            self._clock.next_event()

    def _begin(self, write: Callable[[], None]) -> SwapCopy | None:
        if not self._delay:
            write()
            return None
        copy = SwapCopy(write, self._rng.random() < self._trouble)
        self._num_under_way += 1

        def end() -> None:
            self._num_under_way -= 1
            copy.end()

        self._clock.after(self._delay * self._rng.uniform(0.1, 2.0), end)
        return copy


class SwapCopy:
    """A copy under way. After `cancel` it may still write until it is quiet."""

    def __init__(self, write: Callable[[], None], fails: bool) -> None:
        self._write = write
        self._fails = fails
        self._has_ended = self._cancelled = False

    def end(self) -> None:
        if not self._fails:
            self._write()
        self._has_ended = True

    def is_done(self) -> bool:
        return self._has_ended and not self.has_failed()

    def has_failed(self) -> bool:
        return self._cancelled or (self._has_ended and self._fails)

    def cancel(self) -> None:
        self._cancelled = True

    def is_quiet(self) -> bool:
        return self._has_ended
