"""Memory that an executor shares with its assistants: what is handed over, and the images of adapters."""

from __future__ import annotations

import mmap
import os
import weakref
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from ...memory.transfers.pinned import Extents
from ...ops.lend import HANDOVERS_BYTES
from ...ops.ranks import SPINNING_SECONDS, Ranks


class Pinning(Protocol):
    """Lets a device read and write host memory, at the host's addresses."""

    def pin(self, address: int, num_bytes: int) -> None:
        """MemoryError when the system grants no more."""
        ...

    def unpin(self, address: int) -> None: ...


@dataclass(frozen=True, slots=True)
class AssistLayout:
    """Processes, values that each hands over at once, bytes of images.

    is_woken: rank 0 wakes the others, which a device can't: then they never sleep within a step.
    """

    size: int
    floats: int
    image_bytes: int
    is_woken: bool = True

    @property
    def handovers(self) -> int:
        """Byte at which stands what hand-overs ask for, see `Lent`."""
        return -(-Ranks.num_bytes(self.size, self.floats) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def first_image(self) -> int:
        """Byte at which the images begin."""
        return -(-(self.handovers + HANDOVERS_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        """Bytes in all; the system gives memory as it is written."""
        return self.first_image + self.image_bytes


class AssistMemory:
    """The memory of an open file, of `layout.num_bytes`, mapped; images are cut from chunks that `allocate` gives."""

    def __init__(self, fd: int, layout: AssistLayout, pinning: Pinning | None = None) -> None:
        """pinning: of the device that is to see it, images as they are allocated."""
        self.layout, self._pinning = layout, pinning
        self._mapping = mmap.mmap(fd, layout.num_bytes)
        self._bytes = np.frombuffer(self._mapping, np.uint8)
        self._free = Extents(layout.image_bytes)
        if pinning is not None:
            pinning.pin(self.address(0), layout.first_image)

    @staticmethod
    def create(layout: AssistLayout) -> int:
        """An open file for it, with no name."""
        fd = os.memfd_create("chorus-assistants")
        os.ftruncate(fd, layout.num_bytes)
        return fd

    def ranks(self, rank: int, seconds: float) -> Ranks:
        """See `Ranks`."""
        spinning = SPINNING_SECONDS if self.layout.is_woken else seconds
        return Ranks(self._mapping, rank, self.layout.size, self.layout.floats, seconds, spinning)

    @property
    def handovers(self) -> int:
        """Address of what hand-overs ask for, see `Lent`."""
        return self.address(self.layout.handovers)

    def allocate(self, num_bytes: int) -> np.ndarray:
        """Bytes for images, until they are no longer referenced. MemoryError where there are none."""
        first = self._free.take(num_bytes)
        if first is None:
            raise MemoryError(f"{num_bytes} bytes of images are not left of {self.layout.image_bytes}")
        begin = self.layout.first_image + first
        if self._pinning is not None:
            try:
                self._pinning.pin(self.address(begin), num_bytes)
            except BaseException:
                self._free.give(first, num_bytes)
                raise
        chunk = self._bytes[begin : begin + num_bytes]
        weakref.finalize(chunk, self._give, first, num_bytes).atexit = False
        return chunk

    def _give(self, first: int, num_bytes: int) -> None:
        if self._pinning is not None:
            self._pinning.unpin(self.address(self.layout.first_image + first))
        self._free.give(first, num_bytes)

    def trim(self) -> None:
        """What is no longer referenced is free already."""

    def close(self) -> None:
        """Nothing is handed over any more; images are until they are no longer referenced."""
        if self._pinning is not None:
            self._pinning.unpin(self.address(0))

    def address(self, offset: int) -> int:
        """Address of a byte."""
        return self._bytes.ctypes.data + offset

    def offset(self, data: torch.Tensor) -> int | None:
        """Byte at which a tensor begins; None where it lies elsewhere."""
        found = data.data_ptr() - self._bytes.ctypes.data
        return found if self.layout.first_image <= found < self.layout.num_bytes else None
