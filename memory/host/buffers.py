"""Buffers for reading host images, reused when an image is freed."""

from __future__ import annotations

import ctypes
import math
import mmap
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..pages import hugepages

_ALIGNMENT = 1 << 16


class Buffers(Protocol):
    """A source of host memory to read images into."""

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialized tensor, whose memory is its own while it or a view of it lives."""
        ...

    def take_now(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `take`, but without waiting for memory that the system makes fast first: for threads that launch steps."""
        return self.take(shape, dtype)

    def keep_within(self, room: Callable[[], int]) -> None:
        """Keep freed memory for the next tensors while `room()` bytes are free; any thread calls it. May do nothing."""

    def is_slow(self, tensor: torch.Tensor) -> bool:
        """True if a tensor of `take` lies in memory that is copied slower than other memory of this source."""
        return False

    def moved(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Copy a tensor from `take` to faster memory. Return None if it is already in faster memory, or if that is
        full. Other threads can allocate during the copy.
        """
        return None


class HostBuffers(Buffers):
    """Allocates tensors; when the last reference to one is dropped, its memory is kept for the next.

    The system clears every fresh page, which takes longer than reading an adapter into it. Up to `max_idle_bytes` are
    kept, or as many as `keep_within` allows; beyond that, the longest idle memory is returned to the system. Any thread
    may take or drop.

    A finalizer returns a dropped tensor's memory. It may run at any line of any thread, even in this class, so it never
    waits for the lock.
    """

    def __init__(self, max_idle_bytes: int = 128 << 20) -> None:
        self._max_idle_bytes = max_idle_bytes
        self._room: Callable[[], int] = lambda: 0
        self._idle: list[mmap.mmap] = []  # longest idle first
        self._dropped: deque[mmap.mmap] = deque()  # filled by finalizers
        self._lock = threading.Lock()

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for the next tensors."""
        return sum(map(len, self._idle))

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialized tensor, whose memory is its own while it or a view of it lives."""
        count = math.prod(shape)
        num_bytes = -(-max(1, count * dtype.itemsize) // _ALIGNMENT) * _ALIGNMENT
        mapping = self._find(num_bytes) or hugepages.map_memory(num_bytes)
        lease = (ctypes.c_char * len(mapping)).from_buffer(mapping)
        weakref.finalize(lease, self._give_back, mapping).atexit = False
        return torch.frombuffer(lease, dtype=dtype, count=count).view(*shape)

    def keep_within(self, room: Callable[[], int]) -> None:
        self._room = room

    def _find(self, num_bytes: int) -> mmap.mmap | None:
        """The smallest idle mapping that is large enough and does not waste too much."""
        with self._lock:
            self._collect()
            fitting = [mapping for mapping in self._idle if num_bytes <= len(mapping) <= 2 * num_bytes]
            if not fitting:
                return None
            found = min(fitting, key=len)
            self._idle = [mapping for mapping in self._idle if mapping is not found]
            return found

    def _give_back(self, mapping: mmap.mmap) -> None:
        """Called by finalizers. If the lock is taken, its holder or the next finalizer collects dropped memory."""
        self._dropped.append(mapping)
        if self._lock.acquire(blocking=False):
            try:
                self._collect()
            finally:
                self._lock.release()

    def _collect(self) -> None:
        """Move dropped memory to the idle list, and keep it within the limit. The caller holds the lock."""
        while self._dropped:
            self._idle.append(self._dropped.popleft())
        most = max(self._max_idle_bytes, self._room())
        while self.idle_bytes > most:
            self._idle.pop(0)
