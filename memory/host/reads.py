"""Reads of adapters: threads that run them, of which a file that hangs takes one and no more, and their progress."""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..files.error import AdapterFormatError, LoadFailure
from .image import HostImage
from .limited_threads import ask_for_short_slices

logger = logging.getLogger(__name__)


class Reads(Protocol):
    """Runs reads; the simulator injects one that takes virtual time."""

    def submit(self, read: Callable[[], Any], group: str = "") -> Future:
        """Run `read` soon. Its future is `running()` from when it begins until it ends.

        group: of reads that may all hang at once, such as reads of one directory; empty: none.
        """
        ...

    def is_full(self, group: str) -> bool:
        """True if so many reads of a group hang that no more of it may begin."""
        return False

    def wait(self, pending: list[Future], timeout: float) -> None:
        """Wait until one of `pending` has ended or `wake` is called, at most `timeout` seconds."""
        wait(pending, timeout, FIRST_COMPLETED)

    def wake(self) -> None:
        """End the `wait` under way, or else the next one at once; from any thread."""

    def arrange(self, futures: Sequence[Future]) -> None:
        """Move `futures` that have not begun to the head of the queue, in this order."""

    def set_aside(self, future: Future) -> bool:
        """Stop counting a slow read, so that another may begin; return whether that could be done."""
        return False

    def shutdown(self) -> None: ...


class InlineReads(Reads):
    """Reads at once, on the caller's thread: the read has ended when `submit` returns."""

    def submit(self, read: Callable[[], Any], group: str = "") -> Future:
        future: Future = Future()
        try:
            future.set_result(read())
        except Exception as error:
            future.set_exception(error)
        return future

    def shutdown(self) -> None:
        """Nothing is under way."""


#: Seconds between looks at copies that are awaited with no read under way: chosen, a small part of a step.
LOOK_SECONDS = 5e-4

#: Seconds that a thread without work stays, unless it is the only one.
IDLE_SECONDS = 10.0

#: Seconds that `shutdown` waits at most for reads that were going well.
CLOSE_SECONDS = 1.0


class ThreadReads(Reads):
    """Reads in threads of their own, so that the engine's thread never waits for a disk.

    `threads` read at once. A read set aside no longer counts, so that another may begin in its place, up to
    `most_threads` in all and a quarter of it per group: a directory that hangs keeps no other from being read. Further
    reads wait. A read that never returns keeps its thread for good. The threads are daemons: neither `shutdown` nor the
    end of the process waits for one that hangs.

    To start a thread takes milliseconds while other threads compute. So a thread that begins to read starts the thread
    for the next read; `submit` starts one only if there is none at all.
    """

    def __init__(self, threads: int = 2, most_threads: int = 64) -> None:
        self._num_wanted = threads
        self._most_threads = most_threads
        self._most_of_group = max(1, most_threads // 4)
        self._queue: deque[tuple[Future, Callable[[], Any], str]] = deque()
        self._running: dict[Future, str] = {}  # with their groups
        self._aside: set[Future] = set()  # of `_running`
        self._hanging: Counter[str] = Counter()  # number of `_aside` by group
        self._num_threads = 0
        self._num_idle = 0
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())
        self._news = threading.Event()  # a read has ended, or `wake` was called

    def submit(self, read: Callable[[], Any], group: str = "") -> Future:
        """Run `read` soon. RuntimeError when no thread could be started for it, or after `shutdown`."""
        future: Future = Future()
        with self._changed:
            is_first = self._num_threads == len(self._aside) and self._count_next()
        if is_first:
            self._start()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("adapters are read no more: the engine was closed")
            self._queue.append((future, read, group))
            self._changed.notify()
        return future

    def wait(self, pending: list[Future], timeout: float) -> None:
        """Sleep until a read has ended or `wake` is called, at most `timeout` seconds, or `LOOK_SECONDS` if nothing is
        pending: a copy to a device may be awaited, which gives no signal when it has ended.

        The overhead does not depend on the number of pending reads.
        """
        self._news.wait(timeout if pending else min(timeout, LOOK_SECONDS))
        self._news.clear()

    def wake(self) -> None:
        self._news.set()

    def arrange(self, futures: Sequence[Future]) -> None:
        if len(self._queue) < 2:
            return
        places = {future: place for place, future in enumerate(futures)}
        with self._changed:
            self._queue = deque(sorted(self._queue, key=lambda job: places.get(job[0], len(places))))

    def set_aside(self, future: Future) -> bool:
        with self._changed:
            if future not in self._running:
                return False
            if future not in self._aside:
                self._aside.add(future)
                self._hanging[self._running[future]] += 1
            self._changed.notify()
        return True

    def is_full(self, group: str) -> bool:
        return group != "" and self._hanging[group] >= self._most_of_group

    def shutdown(self) -> None:
        """Drop reads that have not begun. Running reads get a moment to end, except reads set aside.

        So their threads have released their tensors: a thread that frees a tensor while the interpreter ends would kill
        the process by a signal.
        """
        with self._changed:
            self._is_closed = True
            dropped = [future for future, _, _ in self._queue]
            self._queue.clear()
            self._changed.notify_all()
        for future in dropped:
            future.cancel()
        with self._changed:
            self._changed.wait_for(lambda: self._num_threads <= len(self._aside), CLOSE_SECONDS)

    def _work(self) -> None:
        ask_for_short_slices()
        while (job := self._next()) is not None:
            future, read = job
            _run(future, read)
            done = future
            del job, future, read  # what they hold may not wait for the next
            with self._changed:
                group = self._running.pop(done)
                if done in self._aside:
                    self._aside.remove(done)
                    self._hanging[group] -= 1
                self._num_idle += 1
                self._changed.notify()  # others of its group may begin
            self._news.set()
            del done

    def _next(self) -> tuple[Future, Callable[[], Any]] | None:
        """Next read, waiting for it; None when the thread is to end. The thread counts as idle meanwhile."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._may_begin() or self._is_closed, IDLE_SECONDS):
                if self._num_idle > 1:
                    break
            self._num_idle -= 1
            if not self._may_begin():
                self._num_threads -= 1
                self._changed.notify_all()
                return None
            future, read, group = next(job for job in self._queue if not self.is_full(job[2]))
            self._queue.remove((future, read, group))
            self._running[future] = group
            is_last = self._count_next()
        if is_last:
            try:
                self._start()
            except Exception as error:
                logger.warning("no thread could be started for the next adapter read: %s", error)
        return future, read

    def _may_begin(self) -> bool:
        """True if a thread may come for a read. The caller holds the lock."""
        if len(self._running) - len(self._aside) >= self._num_wanted:
            return False
        return any(not self.is_full(group) for _, _, group in self._queue)

    def _count_next(self) -> bool:
        """Count one more thread, which the caller is to start, if none is idle and one may be. It holds the lock."""
        if self._num_idle or self._num_threads == self._most_threads or self._is_closed:
            return False
        self._num_threads += 1
        self._num_idle += 1
        return True

    def _start(self) -> None:
        """Start the thread that `_count_next` has counted. The caller does not hold the lock."""
        try:
            threading.Thread(target=self._work, name="adapter-read", daemon=True).start()
        except BaseException:
            with self._changed:
                self._num_threads -= 1
                self._num_idle -= 1
            raise


def _run(future: Future, read: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = read()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)


#: Seconds after which a read is slow.
SLOW_SECONDS = 1.0

#: Layers come in groups of about so many bytes, and so slowly at least.
_GROUP_BYTES = 16 << 20
_LEAST_BYTES_PER_SECOND = 512 << 10


class ReadStalled(AdapterFormatError):
    """A read made no progress for too long and was given up."""

    failure = LoadFailure.TIMEOUT


@dataclass(slots=True, eq=False)
class ReadWatch:
    """Follows a read's progress; the owner passes the time in.

    What counts is the time without progress, not the total: a slow disk that goes on delivering layers may take its
    time. Layers come in groups, so `patience` includes the time of a group of `num_bytes` at 512 KiB/s. Waiting for a
    thread does not count.
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
        """Record the progress; return whether there was any since the last look."""
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
        """Seconds without progress, or since the request: that the read has begun says nothing about its disk."""
        return now - self._last_brought

    @property
    def layer_seconds(self) -> float:
        """Mean seconds per layer read so far; 0 before the first."""
        return 0.0 if self.began is None or self._num_ready <= 0 else (self.last_moved - self.began) / self._num_ready
