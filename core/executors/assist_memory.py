"""Memory that an executor shares with its assistants: what is handed over, and the images of adapters."""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass

import numpy as np
import torch

from ...memory.transfers.pinned import Extents
from ...ops.ranks import Ranks


@dataclass(frozen=True, slots=True)
class AssistLayout:
    """Processes, values that each hands over at once, bytes of images."""

    size: int
    floats: int
    image_bytes: int

    @property
    def first_image(self) -> int:
        """Byte at which the images begin."""
        return -(-Ranks.num_bytes(self.size, self.floats) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        """Bytes in all; the system gives memory as it is written."""
        return self.first_image + self.image_bytes


class AssistMemory:
    """The memory of an open file, of `layout.num_bytes`, mapped; images are cut from chunks that `allocate` gives."""

    def __init__(self, fd: int, layout: AssistLayout) -> None:
        self.layout = layout
        self._mapping = mmap.mmap(fd, layout.num_bytes)
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        self._free = Extents(layout.image_bytes)

    @staticmethod
    def create(layout: AssistLayout) -> int:
        """An open file for it, with no name."""
        fd = os.memfd_create("chorus-assistants")
        os.ftruncate(fd, layout.num_bytes)
        return fd

    def ranks(self, rank: int, seconds: float) -> Ranks:
        return Ranks(self._mapping, rank, self.layout.size, self.layout.floats, seconds)

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Bytes for images, until they are no longer referenced. MemoryError where no run is as long."""
        first = self._free.take(num_bytes)
        if first is None:
            raise MemoryError(f"{num_bytes} bytes of images are not left of {self.layout.image_bytes}")
        begin = self.layout.first_image + first
        chunk = self._bytes[begin : begin + num_bytes]
        weakref.finalize(chunk, self._free.give, first, num_bytes).atexit = False
        return chunk

    def trim(self) -> None:
        """What is no longer referenced is free already."""

    def address(self, offset: int) -> int:
        """Address of a byte."""
        return self._bytes.ctypes.data + offset

    def offset(self, data: torch.Tensor) -> int | None:
        """Byte at which a tensor begins; None where it lies elsewhere."""
        found = data.data_ptr() - self._bytes.ctypes.data
        return found if self.layout.first_image <= found < self.layout.num_bytes else None
