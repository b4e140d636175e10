"""Rates at which memory is read and copied by several threads."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable
from typing import Any

import torch


class Bandwidth:
    """Rates over a buffer that is larger than every cache, in GB/s (10⁹ bytes)."""

    def __init__(self, buffer: torch.Tensor, threads: int, seconds: float) -> None:
        """buffer: bytes, all zero. seconds: how long each rate is measured; the best repetition counts."""
        self._buffer, self._threads, self._seconds = buffer, threads, seconds
        self._libc = ctypes.CDLL(None)
        self._libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
        self._libc.memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def read(self) -> float:
        """Rate of reading: the best of three reductions. torch must use as many threads."""
        size, start = self._buffer.numel(), self._buffer.data_ptr()
        integers, floats = self._buffer.view(torch.int64), self._buffer.view(torch.float32)
        part = size // self._threads

        def search(index: int) -> None:
            self._libc.memchr(start + index * part, 1, part)  # all zeros: it never finds one

        times = [
            shortest(lambda: self._together(search), self._seconds),
            shortest(integers.sum, self._seconds),
            shortest(lambda: torch.dot(floats, floats), self._seconds),
        ]
        return size / min(times) / 1e9

    def copy(self) -> float:
        """Rate of copying: bytes read plus bytes written."""
        size, start = self._buffer.numel(), self._buffer.data_ptr()
        part = size // self._threads // 2

        def copy(index: int) -> None:
            at = start + 2 * index * part
            self._libc.memcpy(at, at + part, part)

        return size / shortest(lambda: self._together(copy), self._seconds) / 1e9

    def _together(self, work: Callable[[int], None]) -> None:
        """Run `work(i)` on every thread at once; foreign calls release the interpreter's lock."""
        threads = [threading.Thread(target=work, args=(index,)) for index in range(1, self._threads)]
        for thread in threads:
            thread.start()
        work(0)
        for thread in threads:
            thread.join()


def shortest(work: Callable[[], Any], seconds: float) -> float:
    """The shortest time of one call, over at least three calls and `seconds`."""
    work()
    best, deadline, calls = float("inf"), time.perf_counter() + seconds, 0
    while calls < 3 or time.perf_counter() < deadline:
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
        calls += 1
    return best
