"""Threads for what may never return, such as a file on a server that is gone."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ..files.error import AdapterFormatError, forget_frames

T = TypeVar("T")


class NoThreadLeft(Exception):
    """As many threads as there may be are busy or stuck."""


class NoAnswer(TimeoutError):
    """A function exceeded its timeout; its thread goes on."""


class LimitedThreads:
    """A daemon thread for each function, at most `limit` at once: a function that hangs blocks only its own thread.

    No thread has to be joined: it ends with its function, at the latest with the process. May be used by any thread.
    """

    def __init__(self, name: str, limit: int) -> None:
        self._name = name
        self._limit = limit
        self._lock = threading.Lock()
        self._busy = 0

    def run(self, function: Callable[[], T], seconds: float) -> T:
        """Return or raise what `function` does. Raises NoThreadLeft, and NoAnswer after `seconds`."""
        future = self.submit(function)
        try:
            return future.result(seconds)
        except TimeoutError:
            if future.done():
                raise
            raise NoAnswer(f"it did not answer within {seconds:g} seconds") from None
        finally:
            del future  # an error's frames would hold it, and it the error

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """Run `function`. Raises NoThreadLeft."""
        with self._lock:
            if self._busy >= self._limit:
                raise NoThreadLeft(f"all {self._limit} threads that read adapters are busy or stuck")
            self._busy += 1
        future: Future[T] = Future()
        thread = threading.Thread(target=self._run, args=(function, future), name=self._name, daemon=True)
        try:
            thread.start()
        except BaseException:
            self._end()
            raise
        return future

    def _run(self, function: Callable[[], T], future: Future[T]) -> None:
        future.set_running_or_notify_cancel()  # from now on the future can't be cancelled
        ask_for_short_slices()
        try:
            result = function()
        except BaseException as error:
            if isinstance(error, AdapterFormatError):  # its message says it all
                forget_frames(error)  # they hold what was read, for as long as the error is referenced
            self._end()
            future.set_exception(error)
            del future  # this frame is the error's, too
        else:
            self._end()  # before the result is seen, so that its waiter can submit the next
            future.set_result(result)

    def _end(self) -> None:
        with self._lock:
            self._busy -= 1


_SYS_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
_SLICE_NS = 100_000


def ask_for_short_slices() -> bool:
    """Ask Linux to run the calling thread often and briefly, at no higher priority; whether it agreed.

    Threads that compute keep a core for their whole slice of some milliseconds; one with a shorter slice that has
    waited may interrupt them (EEVDF, Linux 6.12). Elsewhere nothing changes.
    """
    number = _SYS_SCHED_SETATTR.get(platform.machine())
    if platform.system() != "Linux" or number is None or os.sched_getscheduler(0) != os.SCHED_OTHER:
        return False
    size, other, nice = 48, os.SCHED_OTHER, os.getpriority(os.PRIO_PROCESS, 0)
    attributes = struct.pack("=IIQiIQQQ", size, other, 0, nice, 0, _SLICE_NS, 0, 0)
    return ctypes.CDLL(None).syscall(number, 0, attributes, 0) == 0
