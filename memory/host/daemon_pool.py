"""Daemon threads for calls that may never return, such as reads from a lost file server: each kind of work has a pool.

The standard library's pool joins its threads when the interpreter exits, so one thread that waits for a dead disk would
keep a process from ending. And one kind of work that fills a shared pool would block all others.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import logging
import os
import platform
import struct
import threading
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, wait
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ..files.error import AdapterFormatError, forget_frames
from ..files.given_up import GivenUp, check_wanted, wanted_while

logger = logging.getLogger(__name__)

T = TypeVar("T")

IDLE_SECONDS = 10.0
"""Seconds that a thread without work stays, unless it is the only one."""


class PoolFull(Exception):
    """All threads of a pool are busy and its queue is full; the same work may be accepted later."""


class NoAnswer(TimeoutError):
    """A call exceeded its timeout; its thread continues."""


class _Call(Future[T]):
    """The outcome of a call."""

    is_given_up = False

    def is_wanted(self) -> bool:
        return not self.is_given_up


def give_up(future: Future) -> None:
    """Cancel a call; one that has begun ends when it next asks `files.given_up.check_wanted`."""
    if not future.cancel() and isinstance(future, _Call):
        future.is_given_up = True


def wait_wanted(future: Future[T], look_seconds: float = 0.05) -> T:
    """The outcome of a call of another pool; it is given up with the calling one. Raises GivenUp, or its error."""
    while True:
        try:
            return future.result(look_seconds)
        except TimeoutError:
            if future.done():
                raise
        try:
            check_wanted()
        except GivenUp:
            give_up(future)
            raise


class DaemonPool(Executor):
    """An executor of daemon threads, started as needed. None of them keeps the process alive.

    `threads` calls run at once. A call set aside no longer counts, so another may begin in its place, up to
    `most_threads` in all and a quarter of that per group. Thus hanging calls don't block others. At most `max_waiting`
    further calls wait for a thread; more raise PoolFull.

    Starting a thread takes milliseconds while other threads compute. So a thread that begins a call starts the thread
    for the next one; `submit` starts one only if there is none at all.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        max_waiting: float = 1024,
        *,
        most_threads: int = 0,
        initializer: Callable[[], object] = lambda: None,
    ) -> None:
        """most_threads: `threads` if that is more. initializer: called first on each thread."""
        self._name = name
        self._num_wanted = threads
        self._max_waiting = max_waiting
        self._most_threads = max(threads, most_threads)
        self._most_of_group = max(1, most_threads // 4)
        self._initializer = initializer
        self._numbers = itertools.count(1)
        self._queue: deque[tuple[_Call, Callable[[], Any], str]] = deque()
        self._running: dict[Future, str] = {}  # with their groups
        self._aside: set[Future] = set()  # a subset of `_running`
        self._hanging: Counter[str] = Counter()  # size of `_aside` by group
        self._num_threads = 0
        self._num_idle = 0
        self._is_closed = False
        self._changed = threading.Condition(threading.Lock())

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run `function` on one of the threads.

        Raises PoolFull, and RuntimeError if no thread could be started for it, or after `shutdown`.
        """
        return self.submit_to("", partial(function, *args, **kwargs))

    def submit_to(self, group: str, call: Callable[[], T]) -> Future[T]:
        """Like `submit`. group: names calls that may all hang at once, such as reads of one directory; empty: none."""
        future: _Call[T] = _Call()
        with self._changed:
            self._check_room()
            is_first = self._num_threads == len(self._aside) and self._count_next()
        if is_first:
            self._start()
        with self._changed:
            self._check_room()
            self._queue.append((future, call, group))
            self._changed.notify()
        return future

    async def run(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
        """Await the result of a call on the running loop. Raises PoolFull."""
        return await asyncio.wrap_future(self.submit(function, *args, **kwargs))

    def wait_for(self, function: Callable[[], T], seconds: float) -> T:
        """Return or raise the outcome of `function`. Raises PoolFull, and NoAnswer after `seconds`."""
        future = self.submit(function)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():
                raise
            give_up(future)
            raise NoAnswer(f"it did not answer within {seconds:g} seconds") from None
        finally:
            del future  # the frames of an error would reference it, and it the error

    def wait(self, futures: Sequence[Future], timeout: float) -> None:
        """Wait until one of `futures` has ended, at most `timeout` seconds."""
        wait(futures, timeout, FIRST_COMPLETED)

    def arrange(self, futures: Sequence[Future]) -> None:
        """Move `futures` that have not begun to the head of the queue, in this order."""
        if len(self._queue) < 2:
            return
        places = {future: place for place, future in enumerate(futures)}
        with self._changed:
            self._queue = deque(sorted(self._queue, key=lambda job: places.get(job[0], len(places))))

    def set_aside(self, future: Future) -> bool:
        """Stop counting a running call, so another may begin; return whether that was possible."""
        with self._changed:
            if future not in self._running:
                return False
            if future not in self._aside:
                self._aside.add(future)
                self._hanging[self._running[future]] += 1
            self._changed.notify()
        return True

    def is_full(self, group: str) -> bool:
        """True if so many calls of a group hang that no more of it may begin."""
        return group != "" and self._hanging[group] >= self._most_of_group

    def shutdown(self, wait: bool = False, *, cancel_futures: bool = True) -> None:
        """Accept no more calls. Never waits, whatever `wait` says: a thread may be stuck forever. See `join`."""
        with self._changed:
            self._is_closed = True
            dropped = [future for future, _, _ in self._queue] if cancel_futures else []
            if cancel_futures:
                self._queue.clear()
            self._changed.notify_all()
        for future in dropped:
            future.cancel()

    def join(self, seconds: float) -> None:
        """After `shutdown`: wait for at most `seconds` until all threads have ended, except calls set aside."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_threads <= len(self._aside), seconds)

    def _check_room(self) -> None:
        """Raise PoolFull if the queue is full. The caller holds the lock."""
        if self._is_closed:
            raise RuntimeError(f"the pool {self._name} is closed")
        most = self._num_wanted + self._max_waiting
        if len(self._running) - len(self._aside) + len(self._queue) >= most:
            self._queue = deque(job for job in self._queue if not job[0].cancelled())
            if len(self._running) - len(self._aside) + len(self._queue) >= most:
                raise PoolFull(f"all {self._num_wanted} threads for {self._name} are busy")

    def _work(self) -> None:
        self._initializer()
        while (job := self._next()) is not None:
            future, call = job
            del job
            self._run(future, call)
            del future, call  # an idle thread keeps nothing alive
            with self._changed:
                self._num_idle += 1

    def _run(self, future: _Call, call: Callable[[], Any]) -> None:
        result: Any = None
        error: BaseException | None = None
        if is_wanted := future.set_running_or_notify_cancel():
            try:
                with wanted_while(future.is_wanted):
                    result = call()
            except BaseException as raised:
                error = raised
                if isinstance(error, AdapterFormatError | GivenUp):  # its message says everything
                    forget_frames(error)  # its frames would keep the read data alive
        with self._changed:  # before the result is visible, so that its waiter can submit the next
            group = self._running.pop(future)
            if future in self._aside:
                self._aside.remove(future)
                self._hanging[group] -= 1
            self._changed.notify()  # other calls of its group may begin
        del call
        if not is_wanted:
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        del future, result, error  # this frame belongs to the error, too

    def _next(self) -> tuple[_Call, Callable[[], Any]] | None:
        """Wait for the next call; None if the thread should end. The thread counts as idle meanwhile."""
        with self._changed:
            while not self._changed.wait_for(lambda: self._may_begin() or self._is_closed, IDLE_SECONDS):
                if self._num_idle > 1:
                    break
            self._num_idle -= 1
            if not self._may_begin():
                self._num_threads -= 1
                self._changed.notify_all()
                return None
            future, call, group = next(job for job in self._queue if not self.is_full(job[2]))
            self._queue.remove((future, call, group))
            self._running[future] = group
            is_last = self._count_next()
        if is_last:
            try:
                self._start()
            except Exception as error:
                logger.warning("no thread could be started for the next of %s: %s", self._name, error)
        return future, call

    def _may_begin(self) -> bool:
        """True if a thread may take a call. The caller holds the lock."""
        if len(self._running) - len(self._aside) >= self._num_wanted:
            return False
        return any(not self.is_full(group) for _, _, group in self._queue)

    def _count_next(self) -> bool:
        """Count one more thread, for the caller to start, if none is idle and one may be. The caller has the lock."""
        if self._num_idle or self._num_threads == self._most_threads or self._is_closed:
            return False
        self._num_threads += 1
        self._num_idle += 1
        return True

    def _start(self) -> None:
        """Start the thread that `_count_next` has counted. The caller does not hold the lock."""
        name = f"chorus-{self._name}-{next(self._numbers)}"
        try:
            threading.Thread(target=self._work, name=name, daemon=True).start()
        except BaseException:
            with self._changed:
                self._num_threads -= 1
                self._num_idle -= 1
            raise


_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SLICE_NS = 100_000


def ask_for_short_slices() -> bool:
    """Ask Linux to run the calling thread often and briefly, without higher priority; return whether it agreed.

    Computing threads keep a core for their whole time slice of some milliseconds. A waiting thread with a shorter slice
    may interrupt them (EEVDF, Linux 6.12). Elsewhere nothing changes.
    """
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    size, other, nice = 48, os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack("=IIQiIQQQ", size, other, 0, nice, 0, _SLICE_NS, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0


_LEAST_PRIORITY = 19


def stand_back(steps: int) -> None:
    """Lower the calling thread's priority to so many steps below the process's or the least, if the system allows it.

    On Linux a priority is a thread's own, and that of the threads that it starts: they stand back no further.
    """
    with suppress(OSError, AttributeError):
        nice = os.getpriority(os.PRIO_PROCESS, os.getpid()) + steps
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), min(nice, _LEAST_PRIORITY))
