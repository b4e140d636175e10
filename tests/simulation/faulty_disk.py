"""A folder of cached blocks on a disk that fails, fills up, hangs and flips bits, read and written in virtual time."""

from __future__ import annotations

import errno
import os
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from chorus.memory.disk.files import Files
from chorus.memory.disk.tier import DiskTier
from chorus.memory.pages.eviction import RestoreCosts

from .virtual_reads import VirtualClock

ID_BYTES = 16


class FileImage:
    """An image of a page that can be read from a file: the number of a content that was written."""

    known: list[list[object]] = []
    """All contents that were written, of one run."""

    def __init__(self) -> None:
        self.data = bytearray(ID_BYTES)

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int | slice) -> Any:
        page = self.known[int.from_bytes(self.data, "big")]
        return [page][index]


def bytes_of(image: Any) -> memoryview:
    if not isinstance(image, FileImage):
        FileImage.known.append(list(image[0]))
        made = FileImage()
        made.data[:] = (len(FileImage.known) - 1).to_bytes(ID_BYTES, "big")
        image = made
    return memoryview(image.data)


class FaultyDisk(Files):
    """Calls fail now and then, are short, or change what they read."""

    def __init__(self, rng: random.Random, reached: Counter[str], trouble: float) -> None:
        self._rng, self._reached, self._trouble = rng, reached, trouble

    def _meets(self, what: str) -> bool:
        met = self._rng.random() < self._trouble
        self._reached[f"disk: {what}"] += met
        return met

    def create(self, path: str, num_bytes: int) -> int:
        if self._meets("full"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(path, num_bytes)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        if self._meets("failed write"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return super().write(fd, data[: max(1, len(data) // 2)] if self._meets("short write") else data)

    def read(self, fd: int, data: memoryview) -> int:
        if self._meets("failed read"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        count = super().read(fd, data)
        if count and self._meets("flipped bit"):
            data[self._rng.randrange(count)] ^= 1 << self._rng.randrange(8)
        return count

    def rename(self, path: str, other: str) -> None:
        if self._meets("failed rename"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        super().rename(path, other)


class VirtualPool:
    """Runs calls after some virtual time, or never."""

    def __init__(self, clock: VirtualClock, rng: random.Random, reached: Counter[str], delay: float, hangs: float):
        self._clock, self._rng, self._reached = clock, rng, reached
        self._delay, self._hangs = delay, hangs

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._rng.random() < self._hangs:
            self._reached["disk: hung"] += 1
        elif self._delay:
            self._clock.after(self._delay * self._rng.uniform(0.1, 2.0), partial(self._run, future, call, arguments))
        else:
            self._run(future, call, arguments)
        return future

    def _run(self, future: Future[Any], call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        try:
            future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)

    def shutdown(self) -> None:
        """Nothing runs that could be stopped."""


def in_virtual_time(disk: DiskTier, clock: VirtualClock, rng: random.Random, reached: Counter[str]) -> None:
    """Let a tier read and write in virtual time, on a faulty disk."""
    disk.folder.files = FaultyDisk(rng, reached, rng.choice([0.0, 0.02, 0.2]))
    disk.close_seconds = 0.0
    disk.costs = RestoreCosts(prefix_page=rng.choice([1e-3, 0.05]), disk_prefix_page=0.0)  # else it reads hardly ever
    delay, hangs = rng.choice([0.0, 0.001, 0.05]), rng.choice([0.0, 0.0, 0.02])
    disk.use_pools(VirtualPool(clock, rng, reached, delay, 0.0), VirtualPool(clock, rng, reached, delay, hangs))
