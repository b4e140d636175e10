"""A folder of cached blocks on a disk that fails, fills up, hangs and flips bits, read and written in virtual time."""

from __future__ import annotations

import errno
import math
import os
import random
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from chorus.core.engine import Engine
from chorus.memory.disk.files import Files
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


class Killed(BaseException):
    """The process ends within a call to the system."""


class FaultyDisk(Files):
    """Calls fail now and then, are short, or change what they read; times of files jump."""

    def __init__(self, clock: VirtualClock, rng: random.Random, reached: Counter[str], trouble: float) -> None:
        self._clock, self._rng, self._reached, self._trouble = clock, rng, reached, trouble
        self.calls_left = math.inf
        """Until the process is killed."""

    def _meets(self, what: str) -> bool:
        met = self._rng.random() < self._trouble
        self._reached[f"disk: {what}"] += met
        return met

    def _call(self, what: str, number: int = errno.EIO) -> None:
        self.calls_left -= 1
        if self.calls_left < 0:
            raise Killed
        if self._meets(what):
            raise OSError(number, os.strerror(number))

    def create(self, path: str, num_bytes: int) -> int:
        self._call("full", errno.ENOSPC)
        return super().create(path, num_bytes)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        self._call("failed write", self._rng.choice([errno.EIO, errno.ENOSPC]))
        return super().write(fd, data[: max(1, len(data) // 2)] if self._meets("short write") else data)

    def open(self, path: str) -> int:
        self._call("failed open")
        return super().open(path)

    def read(self, fd: int, data: memoryview) -> int:
        self._call("failed read")
        if len(data) > 1 and self._meets("short read"):
            data = data[: len(data) // 2]
        count = super().read(fd, data)
        if count and self._meets("flipped bit"):
            data[self._rng.randrange(count)] ^= 1 << self._rng.randrange(8)
        return count

    def rename(self, path: str, other: str) -> None:
        self._call("failed rename")
        super().rename(path, other)
        self._date(other)

    def unlink(self, path: str) -> None:
        self._call("failed removal")
        super().unlink(path)

    def make_folder(self, path: str) -> None:
        self._call("failed folder", self._rng.choice([errno.EIO, errno.ENOSPC]))
        super().make_folder(path)

    def touch(self, path: str) -> None:
        self._call("failed touch")
        self._date(path)

    def _date(self, path: str) -> None:
        """Date a file. The clock of the machine jumps now and then."""
        seconds = self._rng.choice([0.0, 2.0**31]) if self._meets("clock jump") else self._clock.now
        os.utime(path, (seconds, seconds))


class VirtualPool:
    """Runs calls after some virtual time, or never. is_serial: one after another, so that one that hangs holds up all
    that follow.
    """

    def __init__(
        self,
        clock: VirtualClock,
        rng: random.Random,
        reached: Counter[str],
        delay: float,
        hangs: float,
        *,
        is_serial: bool = False,
    ) -> None:
        self._clock, self._rng, self._reached = clock, rng, reached
        self._delay, self._hangs = delay, hangs
        self._is_serial, self._free_at = is_serial, 0.0
        self.is_dead = False

    def submit(self, call: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        if self._rng.random() < self._hangs or self._free_at == math.inf:
            self._reached["disk: hung"] += 1
            self._free_at = math.inf if self._is_serial else 0.0
        elif self._delay:
            seconds = self._delay * self._rng.uniform(0.1, 2.0)
            if self._is_serial:
                self._free_at = max(self._free_at, self._clock.now) + seconds
                seconds = self._free_at - self._clock.now
            self._clock.after(seconds, partial(self._run, future, call, arguments))
        else:
            self._run(future, call, arguments)
        return future

    def _run(self, future: Future[Any], call: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if self.is_dead:
            return
        try:
            future.set_result(call(*arguments))
        except Exception as error:
            future.set_exception(error)

    def wait(self, futures: Sequence[Future[Any]], timeout: float) -> None:
        """Let time go by until one of some calls has ended, at most `timeout` seconds."""
        end = self._clock.now + timeout
        while not any(each.done() for each in futures) and self._clock.next_time <= end:
            self._clock.next_event()
        if not any(each.done() for each in futures):
            self._clock.advance(max(0.0, end - self._clock.now))

    def shutdown(self) -> None:
        """What hangs may go on for good."""


class JumpingClock:
    """A clock that leaps ahead now and then, as after a pause of the machine."""

    def __init__(self, clock: VirtualClock, rng: random.Random, reached: Counter[str], share: float) -> None:
        self._clock, self._rng, self._reached, self._share = clock, rng, reached, share
        self._ahead = 0.0

    def __call__(self) -> float:
        if self._rng.random() < self._share:
            self._ahead += self._rng.choice([0.1, 1e6])
            self._reached["disk: leap of the clock"] += 1
        return self._clock.now + self._ahead


class FilesInVirtualTime:
    """The disk tier of an engine: it reads and writes in virtual time, on a faulty disk."""

    def __init__(self, engine: Engine, clock: VirtualClock, rng: random.Random, reached: Counter[str]) -> None:
        assert engine.disk is not None
        self._engine, self._clock, self._rng, self._reached = engine, clock, rng, reached
        self._disk = disk = engine.disk
        self.root = Path(disk.folder.root)
        self.num_foreign_bytes = 0
        """Bytes that no server wrote."""
        self._calls = disk.folder.files = FaultyDisk(clock, rng, reached, rng.choice([0.0, 0.0, 0.02, 0.2]))
        disk.close_seconds, disk.turn_blocks = 0.01, rng.choice([1, 2, 16])
        # else it reads, and copies, hardly ever
        disk.costs = RestoreCosts(prefix_page=rng.choice([1e-3, 0.05, 1.0]), disk_prefix_page=0.0)
        if rng.random() < 0.7:
            engine.costs.host_prefix_page, engine.costs.prefix_page = 0.0, 1.0
        disk.clock = JumpingClock(clock, rng, reached, rng.choice([0.0, 0.0, 0.01]))
        delay, hangs = rng.choice([0.0, 0.001, 0.05]), rng.choice([0.0, 0.0, 0.02])
        self._writer = VirtualPool(clock, rng, reached, delay, hangs / 10, is_serial=True)
        self._reader = VirtualPool(clock, rng, reached, delay, hangs)
        disk.use_pools(self._writer, self._reader)

    def num_bytes(self) -> int:
        """Bytes of all blocks, and of those that are being written."""
        return sum(path.stat().st_size for path in self._files("blocks", "new"))

    def _files(self, *folders: str) -> list[Path]:
        return sorted(path for folder in folders for path in (self.root / folder).rglob("*") if path.is_file())

    def stop(self) -> None:
        """Let the engine's end write what only the pool has; the disk may hang meanwhile."""
        if self._rng.random() < 0.8:
            self._clock.advance(1.0)
            self._disk.use_pools(VirtualPool(self._clock, self._rng, self._reached, 0.0, 0.0), self._reader)

    def kill(self) -> None:
        """End the process, often while it writes: nothing that it began goes on."""
        if self._rng.random() < 0.7:
            self._calls.calls_left = self._rng.randint(0, 12)
            try:
                self._disk.writer.write_all()  # as its thread does
            except Killed:
                self._reached["killed while it wrote"] += 1
        self._writer.is_dead = self._reader.is_dead = self._disk.is_closed = True

    def damage(self) -> None:
        """Somebody, or the disk, changes files."""
        rng, found = self._rng, self._files("blocks")
        if not found:
            return
        for path in rng.sample(found, rng.choice([1, (len(found) + 1) // 2, len(found)])):
            how, data = rng.choice(["flip", "cut", "longer", "swap", "empty", "gone", "folder"]), path.read_bytes()
            self._reached[f"file: {how}"] += 1
            if how == "flip":
                at = rng.randrange(len(data)) if data else 0
                path.write_bytes(
                    data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :] if data else b""
                )
            elif how == "cut":
                path.write_bytes(data[: rng.randrange(len(data) + 1)])
            elif how == "longer":
                path.write_bytes(data + bytes(added := rng.randint(1, 100)))
                self.num_foreign_bytes += added
            elif how == "swap":
                other = rng.choice(found)
                foreign = other.read_bytes() if other.is_file() else b""
                path.write_bytes(foreign)
                self.num_foreign_bytes += max(0, len(foreign) - len(data))
            elif how == "empty":
                path.write_bytes(bytes(len(data)))
            elif how in ("gone", "folder"):
                path.unlink()
                if how == "folder":
                    path.mkdir()
