"""Threads that read adapters, of which a file that hangs takes one and no more."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any

from .reads import Reads
from .short_slices import ask_for_short_slices

logger = logging.getLogger(__name__)

#: Seconds that a thread without work stays.
IDLE_SECONDS = 10.0

#: Seconds that `shutdown` waits at most for reads that were going well.
CLOSE_SECONDS = 1.0


class ThreadReads(Reads):
    """Reads in threads of their own, so that the engine's thread never waits for a disk.

    `threads` read at once. One whose read is set aside no longer counts, so that another may begin in its place: of
    those there are as many as make `most_threads` in all, and what is beyond waits. A read that never returns keeps its
    thread for good. The threads are daemons: neither `shutdown` nor the end of the process waits for one that hangs.
    """

    def __init__(self, threads: int = 2, most_threads: int = 64) -> None:
        self._num_wanted = threads
        self._most_threads = most_threads
        self._queue: deque[tuple[Future, Callable[[], Any]]] = deque()
        self._running: set[Future] = set()
        self._aside: set[Future] = set()  # of those that run
        self._num_threads = 0
        self._num_idle = 0
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())
        self._woken: Future = Future()
        self._wake_lock = threading.Lock()

    def submit(self, read: Callable[[], Any]) -> Future:
        """Run `read` soon. RuntimeError when no thread could be started for it, or after `shutdown`."""
        future: Future = Future()
        with self._changed:
            if self._is_closed:
                raise RuntimeError("adapters are read no more: the engine was closed")
            self._queue.append((future, read))
            try:
                self._find_threads()
            except RuntimeError:
                if self._num_threads == len(self._aside):  # nobody is there to come to it
                    self._queue.pop()
                    raise
        return future

    def wait(self, pending: list[Future], timeout: float) -> None:
        """Sleep until one of `pending` has ended or somebody calls `wake`, at most `timeout` seconds."""
        if not pending:
            return
        wait([*pending, self._woken], timeout, FIRST_COMPLETED)
        with self._wake_lock:
            if self._woken.done():
                self._woken = Future()

    def wake(self) -> None:
        with self._wake_lock:
            if not self._woken.done():
                self._woken.set_result(None)

    def set_aside(self, future: Future) -> bool:
        with self._changed:
            if future not in self._running:
                return False
            self._aside.add(future)
            try:
                self._find_threads()
            except RuntimeError as error:
                logger.warning("no thread could be started beside a slow adapter read: %s", error)
        return True

    @property
    def num_threads(self) -> int:
        return self._num_threads

    def shutdown(self) -> None:
        """Drop what has not begun. Reads that were not set aside get a moment to end; nothing waits for others."""
        with self._changed:
            self._is_closed = True
            dropped = [future for future, _ in self._queue]
            self._queue.clear()
            running = self._running - self._aside
            self._changed.notify_all()
        for future in dropped:
            future.cancel()
        wait(running, CLOSE_SECONDS)

    def _find_threads(self) -> None:
        """Have somebody come for each read in the queue, as far as threads may be. The caller holds the lock."""
        self._changed.notify(len(self._queue))
        while (
            len(self._queue) > self._num_idle
            and self._num_threads - len(self._aside) < self._num_wanted
            and self._num_threads < self._most_threads
        ):
            self._num_threads += 1
            self._num_idle += 1  # until it comes for the first
            try:
                threading.Thread(target=self._work, name="adapter-read", daemon=True).start()
            except BaseException:
                self._num_threads -= 1
                self._num_idle -= 1
                raise

    def _work(self) -> None:
        ask_for_short_slices()
        while (job := self._next()) is not None:
            future, read = job
            _run(future, read)
            done = future
            del job, future, read  # what they hold may not wait for the next
            if not self._go_on_after(done):
                return
            del done

    def _next(self) -> tuple[Future, Callable[[], Any]] | None:
        """Next read, waiting for it; None when the thread is to end. The thread counts as idle meanwhile."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._queue or self._is_closed, IDLE_SECONDS) or not self._queue:
                self._num_idle -= 1
                self._num_threads -= 1
                return None
            self._num_idle -= 1
            job = self._queue.popleft()
            self._running.add(job[0])
            return job

    def _go_on_after(self, done: Future) -> bool:
        """True if the thread may look for another read; it was replaced if its last one was set aside."""
        with self._changed:
            self._running.discard(done)
            self._aside.discard(done)
            if self._num_threads - len(self._aside) > self._num_wanted:
                self._num_threads -= 1
                return False
            self._num_idle += 1
            return True


def _run(future: Future, read: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = read()
    except BaseException as error:
        future.set_exception(error)
    else:
        future.set_result(result)
