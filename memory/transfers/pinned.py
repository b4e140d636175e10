"""Pinned host memory for images, so that their copies overlap with compute."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from bisect import bisect
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from ..host.buffers import Buffers, HostBuffers
from .cuda_driver import CupyCalls
from .transfer import ExecutorLost

logger = logging.getLogger(__name__)


class Extents:
    """Free runs of a chunk of `size` units. Adjacent runs merge; a request takes the smallest run that fits."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._free = [(0, size)]  # (first, length), by first

    def take(self, count: int) -> int | None:
        """Take `count` consecutive units and return the first; None if no free run is long enough."""
        fits = [(length, first) for first, length in self._free if length >= count]
        if not fits:
            return None
        length, first = min(fits)
        index = self._free.index((first, length))
        self._free[index : index + 1] = [(first + count, length - count)] if length > count else []
        return first

    def give(self, first: int, count: int) -> None:
        """Free the units of `take(count)`."""
        index = bisect(self._free, (first, 0))
        if index < len(self._free) and first + count == self._free[index][0]:
            count += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == first:
            before = self._free.pop(index - 1)
            first, count = before[0], before[1] + count
            index -= 1
        self._free.insert(index, (first, count))

    @property
    def is_free(self) -> bool:
        """True if every unit is free."""
        return self._free == [(0, self.size)]


#: Chunks are pinned whole, which takes tens of milliseconds; large chunks waste little between images of mixed sizes.
CHUNK_BYTES = 256 << 20

#: Chunks are split at multiples of this size, the system's own page, so no two tensors share a page.
UNIT_BYTES = 4096

_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation


class CupyPinnedMemory(CupyCalls):
    """CuPy's pool, which allocates powers of two.

    index: the device to pin for; None if no device is needed. allocator: source of the pool's blocks, as in
    `cupy.cuda.PinnedMemoryPool`; CuPy's own by default.
    """

    def __init__(
        self,
        index: int | None,
        allocator: Callable[[int], Any] | None = None,
        failure: Callable[[], str | None] = lambda: None,
    ) -> None:
        super().__init__(index, failure)
        self._pool = self._cuda.PinnedMemoryPool(allocator) if allocator else self._cuda.PinnedMemoryPool()

    def allocate(self, num_bytes: int) -> Any:
        """Allocate a buffer that lasts while it is referenced. Raises MemoryError or ExecutorLost."""
        try:
            with self._device():
                return self._pool.malloc(num_bytes)
        except self._cuda.runtime.CUDARuntimeError as error:
            if error.status != _OUT_OF_MEMORY:
                raise
            raise MemoryError(str(error)) from error

    def trim(self) -> None:
        """Return unreferenced buffers to the system."""
        with self._device():
            self._pool.free_all_blocks()


class TorchPinnedMemory:
    """Torch's own pinned memory, for a machine without CuPy."""

    def allocate(self, num_bytes: int) -> Any:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True).numpy()

    def trim(self) -> None:
        """Does nothing: torch keeps its blocks."""


class PinnedMemory(Protocol):
    """The source of chunks."""

    def allocate(self, num_bytes: int) -> Any:
        """Allocate a buffer that lasts as long as it is referenced. Raises MemoryError if there is no more."""
        ...

    def trim(self) -> None:
        """Free buffers that are no longer referenced."""
        ...


@dataclass(slots=True)
class _Chunk:
    owner: PinnedMemory
    """Kept by a chunk in use: when CuPy's pool dies it frees all its memory, used or not."""
    memory: Any
    address: int
    num_bytes: int
    extents: Extents


class PinnedBuffers(Buffers):
    """Allocates tensors from pinned chunks, as HostBuffers does from ordinary memory; any thread may take or drop them.

    A tensor's memory becomes free once the last reference to it or to a view of it is dropped; a transfer holds its
    image until the last copy is complete. Chunks are powers of two, because the pool rounds up to them: separate
    allocations would waste up to half of the pinned memory. limit_bytes: how much may be pinned. Beyond it, ordinary
    memory is used, with correct but slow copies, until `moved` finds room.

    While one thread pins a chunk, other threads can still allocate from earlier chunks. A thread waits only if it needs
    a new chunk itself.
    """

    def __init__(self, memory: PinnedMemory, limit_bytes: int, chunk_bytes: int = CHUNK_BYTES) -> None:
        self._memory = memory
        self._limit_bytes = limit_bytes
        self._chunk_bytes = _power_of_two(chunk_bytes)
        self._chunks: list[_Chunk] = []  # changes while both locks are held
        self._dropped: deque[tuple[_Chunk, int, int]] = deque()  # filled by finalizers, which may run at any line
        self._lock = threading.Lock()  # guards the extents; held briefly
        self._pinning = threading.Lock()  # held while the system pins memory; taken before `_lock`
        self._ordinary = HostBuffers()
        self._told = False

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Allocate an uninitialized tensor, whose memory is its own while it or a view of it lives."""
        pinned = self._take_pinned(shape, dtype)
        if pinned is None:
            self._tell_once(math.prod(shape) * dtype.itemsize)
            return self._ordinary.take(shape, dtype)
        return pinned

    def take_now(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """As `take`, but from chunks that are pinned already: to pin one takes tens of milliseconds. Another thread
        pins one for the next tensors.
        """
        pinned = self._take_pinned(shape, dtype, may_pin=False)
        if pinned is not None:
            return pinned
        if not self._pinning.locked():
            num_units = _num_units(math.prod(shape) * dtype.itemsize)
            threading.Thread(target=self._grow, args=(num_units,), name="chorus-pinning", daemon=True).start()
        return self._ordinary.take(shape, dtype)

    def is_slow(self, tensor: torch.Tensor) -> bool:
        """True if a tensor of `take` lies in ordinary memory. Never waits for the lock: a live tensor's chunk stays."""
        address = tensor.data_ptr()
        return not any(chunk.address <= address < chunk.address + chunk.num_bytes for chunk in self._chunks)

    def moved(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Copy a tensor from `take` to pinned memory. Return None if it is already pinned, or if pinned memory is full.

        The lock is free during the copy, which one thread makes without the interpreter's lock.
        """
        if not self.is_slow(tensor):
            return None
        pinned = self._take_pinned(tensor.shape, tensor.dtype)
        if pinned is not None:
            np.copyto(bytes_of(pinned), bytes_of(tensor))
        return pinned

    def reserve(self, num_bytes: int) -> int:
        """Pin whole chunks of at most `num_bytes`, within the limit; return the bytes. Then no read waits for it."""
        size, most = self._chunk_bytes, min(num_bytes, self._limit_bytes)
        while UNIT_BYTES < size > most:
            size //= 2
        with self._pinning:
            while self._held() + size <= most and (chunk := self._pin(size)) is not None:
                with self._lock:
                    self._chunks.append(chunk)
            return self._held()

    def _take_pinned(self, shape: Sequence[int], dtype: torch.dtype, *, may_pin: bool = True) -> torch.Tensor | None:
        """Allocate pinned memory. Return None if it is full. may_pin: pin a chunk if the others are full."""
        count = math.prod(shape)
        num_units = _num_units(count * dtype.itemsize)
        lease = self._find(num_units)
        if lease is None and may_pin:
            with self._pinning:
                lease = self._find(num_units)  # perhaps in a chunk that another thread has just pinned
                if lease is None:
                    lease = self._extend(num_units)
        return None if lease is None else torch.frombuffer(lease, dtype=dtype, count=count).view(tuple(shape))

    def _find(self, num_units: int) -> np.ndarray | None:
        """Lease a free part of a chunk, if there is one."""
        with self._lock:
            self._collect()
            for chunk in self._chunks:
                if (first := chunk.extents.take(num_units)) is not None:
                    return self._lease(chunk, first, num_units)
        return None

    def _grow(self, num_units: int) -> None:
        """Pin a chunk with room for so many units, unless there is one by now."""
        with self._pinning, suppress(ExecutorLost):  # of which the next step tells
            if self._find(num_units) is None:
                self._extend(num_units)  # the lease is dropped at once

    def _extend(self, num_units: int) -> np.ndarray | None:
        """Lease part of a new chunk, if one may be pinned. The caller holds `_pinning`."""
        size = self._make_way(num_units * UNIT_BYTES)
        chunk = None if size is None else self._pin(size)
        if chunk is None:
            return None
        with self._lock:
            self._chunks.append(chunk)
            first = chunk.extents.take(num_units)
            assert first is not None, "the chunk was made large enough"
            return self._lease(chunk, first, num_units)

    def _lease(self, chunk: _Chunk, first: int, num_units: int) -> np.ndarray:
        """Lease part of a chunk; the tensor's storage keeps the lease alive, and the lease keeps the chunk's memory."""
        try:
            lease = np.frombuffer(chunk.memory, np.uint8, num_units * UNIT_BYTES, first * UNIT_BYTES)
        except BaseException:
            self._dropped.append((chunk, first, num_units))
            raise
        weakref.finalize(lease, self._dropped.append, (chunk, first, num_units)).atexit = False
        return lease

    def _tell_once(self, num_bytes: int) -> None:
        if not self._told:
            self._told = True
            logger.warning(
                "none of the pinned host memory (at most %d MiB) is free for %d MiB: such adapters load slower, until "
                "there is room; raise host_cache_bytes",
                self._limit_bytes >> 20,
                -(-num_bytes >> 20),
            )

    def _collect(self) -> None:
        while self._dropped:
            chunk, first, num_units = self._dropped.popleft()
            chunk.extents.give(first, num_units)

    def _make_way(self, num_bytes: int) -> int | None:
        """Choose the size of a new chunk of at least `num_bytes`, freeing unused chunks if needed; None if the limit
        leaves no room. The caller holds `_pinning`.
        """
        least = _power_of_two(num_bytes)
        size = max(least, self._chunk_bytes)
        with self._lock:
            self._collect()
            used = [chunk for chunk in self._chunks if not chunk.extents.is_free]
            in_use = sum(chunk.num_bytes for chunk in used)
            while size > least and in_use + size > self._limit_bytes:
                size //= 2
            if in_use + size > self._limit_bytes:
                return None
            if self._held() + size <= self._limit_bytes:
                return size
            unused, self._chunks = self._chunks, used
        del unused  # a chunk's memory may be unpinned now, which takes as long
        self._memory.trim()
        return size

    def _pin(self, size: int) -> _Chunk | None:
        """Pin a chunk of `size` bytes, if the system allows it. The caller holds `_pinning`, and not `_lock`."""
        try:
            memory = self._memory.allocate(size)
        except MemoryError as error:
            logger.warning("cannot pin %d bytes of host memory (%s); adapters load slower", size, error)
            return None
        address = np.frombuffer(memory, np.uint8, 1).ctypes.data
        return _Chunk(self._memory, memory, address, size, Extents(size // UNIT_BYTES))

    def _held(self) -> int:
        return sum(chunk.num_bytes for chunk in self._chunks)


def bytes_of(tensor: torch.Tensor) -> np.ndarray:
    """View a contiguous tensor on the host as bytes."""
    return tensor.view(-1).view(torch.uint8).numpy()


def _num_units(num_bytes: int) -> int:
    return max(1, -(-num_bytes // UNIT_BYTES))


def _power_of_two(num_bytes: int) -> int:
    return max(UNIT_BYTES, 1 << (num_bytes - 1).bit_length())
