"""Reads of adapters: the threads that run them, of which a hanging file blocks only one, and their progress.

Tests: tests/memory/host/test_read_threads.py, tests/memory/host/test_host_images.py.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..files.error import AdapterFormatError, LoadFailure
from .daemon_pool import DaemonPool, ask_for_short_slices
from .image import HostImage


class Reads(Protocol):
    """Runs reads; the simulator injects one that takes virtual time."""

    def submit(self, read: Callable[[], Any], group: str = "") -> Future:
        """Run `read` soon. Its future is `running()` from its beginning to its end.

        group: names reads that may all hang at once, such as reads of one directory; empty: none.
        """
        ...

    def is_full(self, group: str) -> bool:
        """True if so many reads of a group hang that no more of it may begin."""
        return False

    def wait(self, pending: list[Future], timeout: float) -> None:
        """Wait until one of `pending` has ended or `wake` is called, at most `timeout` seconds."""
        wait(pending, timeout, FIRST_COMPLETED)

    def wake(self) -> None:
        """End the present `wait`, or else the next one at once; thread-safe."""

    def arrange(self, futures: Sequence[Future]) -> None:
        """Move `futures` that have not begun to the head of the queue, in this order."""

    def set_aside(self, future: Future) -> bool:
        """Stop counting a slow read, so another may begin; return whether that was possible."""
        return False

    def shutdown(self) -> None: ...


#: Seconds between two checks for copies that are awaited with no read in flight: a small part of a step.
LOOK_SECONDS = 5e-4

#: The most seconds that `shutdown` waits for reads that make progress.
CLOSE_SECONDS = 1.0


class ThreadReads(Reads):
    """Reads on its own threads, so the engine's thread never waits for a disk.

    `threads` read at once; see `DaemonPool` for reads that are set aside. A read that never returns keeps its thread
    forever.
    """

    def __init__(self, threads: int = 2, most_threads: int = 64) -> None:
        self._pool = DaemonPool(
            "adapter-read", threads, math.inf, most_threads=most_threads, initializer=ask_for_short_slices
        )
        self._news = threading.Event()  # a read has ended, or `wake` was called

    def submit(self, read: Callable[[], Any], group: str = "") -> Future:
        """Run `read` soon. Raises RuntimeError if no thread could be started for it, or after `shutdown`."""
        future = self._pool.submit_to(group, read)
        future.add_done_callback(lambda _: self._news.set())
        return future

    def wait(self, pending: list[Future], timeout: float) -> None:
        """Sleep until a read has ended or `wake` is called, at most `timeout` seconds.

        If nothing is pending, it sleeps at most `LOOK_SECONDS`: a copy to a device may be awaited, and its end gives no
        signal. The overhead does not depend on the number of pending reads.
        """
        self._news.wait(timeout if pending else min(timeout, LOOK_SECONDS))
        self._news.clear()

    def wake(self) -> None:
        self._news.set()

    def arrange(self, futures: Sequence[Future]) -> None:
        self._pool.arrange(futures)

    def set_aside(self, future: Future) -> bool:
        return self._pool.set_aside(future)

    def is_full(self, group: str) -> bool:
        return self._pool.is_full(group)

    def shutdown(self) -> None:
        """Drop reads that have not begun. Running reads get a moment to end, except reads set aside.

        Then their threads have released their tensors: a thread that frees a tensor while the interpreter ends would
        kill the process by a signal.
        """
        self._pool.shutdown()
        self._pool.join(CLOSE_SECONDS)


#: Seconds after which a read is slow.
SLOW_SECONDS = 1.0

#: Layers are read in groups of about this many bytes, at no less than this rate.
_GROUP_BYTES = 16 << 20
_LEAST_BYTES_PER_SECOND = 512 << 10


class ReadStalled(AdapterFormatError):
    """A read made no progress for too long and was abandoned."""

    failure = LoadFailure.TIMEOUT


@dataclass(slots=True, eq=False)
class ReadWatch:
    """Tracks a read's progress; the owner passes the time in.

    The time without progress counts, not the total: a slow disk that keeps delivering layers may take its time. Layers
    come in groups, so `patience` includes the time for a group of `num_bytes` at 512 KiB/s. Waiting for a thread does
    not count.
    """

    _future: Future
    _image: HostImage
    _num_bytes: int
    _stall_seconds: float
    last_moved: float
    began: float | None = None
    _num_ready: int = 0
    _last_brought: float = field(init=False)  # or time of the request

    def __post_init__(self) -> None:
        self._last_brought = self.last_moved

    @property
    def patience(self) -> float:
        return self._stall_seconds + min(self._num_bytes, _GROUP_BYTES) / _LEAST_BYTES_PER_SECOND

    def look(self, now: float) -> bool:
        """Record the progress; return whether there was any since the last check."""
        if self.began is None:
            if not self._future.running():
                return False
            self.began = self.last_moved = now
        ready = self._image.stream.num_ready
        if ready == self._num_ready:
            return False
        self._num_ready, self.last_moved, self._last_brought = ready, now, now
        return True

    def is_slow(self, now: float) -> bool:
        return self.began is not None and now - self.began > SLOW_SECONDS

    def stalled_seconds(self, now: float) -> float:
        """Seconds without progress; 0 while it waits for a thread."""
        return 0.0 if self.began is None else now - self.last_moved

    def quiet_seconds(self, now: float) -> float:
        """Seconds without progress, or since the request: the start of a read says nothing about its disk."""
        return now - self._last_brought

    @property
    def layer_seconds(self) -> float:
        """Mean seconds per layer read so far; 0 before the first."""
        return 0.0 if self.began is None or self._num_ready <= 0 else (self.last_moved - self.began) / self._num_ready
