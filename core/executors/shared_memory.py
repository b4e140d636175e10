"""Memory shared by an executor's processes: their collectives, and arenas or images of adapters.

Tests: tests/core/executors/test_ranks.py, tests/core/executors/test_cuda_ranks.py
"""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...memory.transfers.pinned import Extents
from ...ops.ranks.ranks import Ranks

#: The least size of the room for images.
LEAST_IMAGE_BYTES = 64 << 20


def image_bytes(host_bytes: int) -> int:
    """Room for images: twice the host memory budget, because gaps are lost. Only used pages take memory."""
    return max(LEAST_IMAGE_BYTES, 2 * host_bytes)


class Pinning(Protocol):
    """Lets a device read and write host memory, at the host's addresses."""

    def pin(self, address: int, num_bytes: int) -> None:
        """Pin memory. Raises MemoryError if the system grants no more."""
        ...

    def unpin(self, address: int) -> None: ...


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Sizes of the parts of the shared memory."""

    size: int
    """Number of processes."""
    floats: int
    """Values that each process sums or sends at once."""
    more_bytes: int
    """Further bytes that all processes see."""
    room_bytes: int
    """Bytes after those, for arenas or images."""

    @property
    def first_more(self) -> int:
        """Byte at which the `more_bytes` begin."""
        return _whole_pages(Ranks.num_bytes(self.size, self.floats))

    @property
    def first_room(self) -> int:
        """Byte at which the room begins."""
        return _whole_pages(self.first_more + self.more_bytes)

    @property
    def num_bytes(self) -> int:
        """Bytes in all; the system provides memory as it is written."""
        return self.first_room + self.room_bytes


class SharedMemory:
    """The mapped memory of an open file of `layout.num_bytes`; images are cut from chunks of `allocate`."""

    def __init__(self, fd: int, layout: MemoryLayout, pinning: Pinning | None = None) -> None:
        """pinning: of the device that copies images from here."""
        self.layout, self._pinning = layout, pinning
        self._mapping = mmap.mmap(fd, layout.num_bytes)
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        self._free = Extents(layout.room_bytes)
        self.chunks: dict[int, int] = {}
        """Size of each chunk, by its first byte."""

    @staticmethod
    def create(layout: MemoryLayout) -> int:
        """Create an open, unnamed file for it."""
        fd = os.memfd_create("chorus-ranks")
        os.ftruncate(fd, layout.num_bytes)
        return fd

    def ranks(self, rank: int, seconds: float) -> Ranks:
        """See `Ranks`."""
        return Ranks(self._mapping, rank, self.layout.size, self.layout.floats, seconds)

    def more(self, dtype: type[np.generic]) -> np.ndarray:
        """The `more_bytes`, flat."""
        begin = self.layout.first_more
        return self._bytes[begin : begin + self.layout.more_bytes].view(dtype)

    def tensor(self, offset: int, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """View a tensor at a byte offset: another process's image, or an arena."""
        return torch.frombuffer(self._mapping, dtype=dtype, count=shape[0] * shape[1], offset=offset).view(shape)

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Allocate bytes for images, freed when nothing references them. Raises MemoryError if none are left."""
        first = self._free.take(num_bytes)
        if first is None:
            raise MemoryError(f"{num_bytes} bytes for images don't fit in the shared {self.layout.room_bytes}")
        begin = self.layout.first_room + first
        if self._pinning is not None:
            try:
                self._pinning.pin(self.address(begin), num_bytes)
            except BaseException:
                self._free.give(first, num_bytes)
                raise
        chunk = self._bytes[begin : begin + num_bytes]
        self.chunks[begin] = num_bytes
        weakref.finalize(chunk, self._give, first, num_bytes).atexit = False
        return chunk

    def _give(self, first: int, num_bytes: int) -> None:
        self.chunks.pop(self.layout.first_room + first, None)
        if self._pinning is not None:
            self._pinning.unpin(self.address(self.layout.first_room + first))
        self._free.give(first, num_bytes)

    def trim(self) -> None:
        """Does nothing: unreferenced memory is already free."""

    def address(self, offset: int) -> int:
        """Address of a byte."""
        return self._bytes.ctypes.data + offset

    def offset(self, data: torch.Tensor) -> int | None:
        """Byte at which an image begins; None if it is not in this memory."""
        found = data.data_ptr() - self._bytes.ctypes.data
        return found if self.layout.first_room <= found < self.layout.num_bytes else None


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
