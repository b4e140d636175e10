"""Memory that the ranks of a model share: their sums, their arenas, and how far adapters on their way have come.

The first rank copies adapters and swapped KV into all arenas and out of them, so that the others need not be asked, and
where an adapter's layers are is known to all ranks at once.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch

from ...ops.ranks import Ranks
from ..model.shard import Shard

#: Adapters that may be on their way into the arenas at once.
NUM_COUNTS = 4096

_COUNT_BYTES = 4 * NUM_COUNTS


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Number of ranks, values that they add up at once, pages and bytes of an arena; seconds: see `Ranks`."""

    size: int
    floats: int
    num_pages: int
    arena_bytes: int
    seconds: float

    @property
    def first_arena(self) -> int:
        """Byte at which the arenas begin."""
        return -(-(Ranks.num_bytes(self.size, self.floats) + _COUNT_BYTES) // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def arena_stride(self) -> int:
        """Bytes from arena to arena."""
        return -(-self.arena_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def num_bytes(self) -> int:
        """Bytes in all; the system gives memory as it is written."""
        return self.first_arena + self.size * self.arena_stride


class RankMemory:
    """The memory of an open file, of `layout.num_bytes`, mapped."""

    def __init__(self, fd: int, layout: MemoryLayout) -> None:
        self.layout = layout
        self._mapping = mmap.mmap(fd, layout.num_bytes)
        self.counts = np.frombuffer(
            self._mapping, np.int32, NUM_COUNTS, Ranks.num_bytes(layout.size, layout.floats)
        )  # fmt: skip
        """Layers that have arrived, of each adapter on its way."""

    @staticmethod
    def create(layout: MemoryLayout) -> int:
        """An open file for it, with no name."""
        fd = os.memfd_create("chorus-ranks")
        os.ftruncate(fd, layout.num_bytes)
        return fd

    def ranks(self, rank: int) -> Ranks:
        return Ranks(self._mapping, rank, self.layout.size, self.layout.floats, self.layout.seconds)

    def arena(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """A rank's arena, flat."""
        at, count = self.layout.first_arena + rank * self.layout.arena_stride, self.layout.arena_bytes // dtype.itemsize
        return torch.frombuffer(self._mapping, dtype=dtype, count=count, offset=at)


class RankSeat:
    """A rank's place: its share of the model, its arena, and the sums over all ranks."""

    def __init__(self, shard: Shard, memory: RankMemory) -> None:
        self.shard = shard
        self.memory = memory
        self.ranks = memory.ranks(shard.rank)
        self.num_pages = memory.layout.num_pages

    def pages(self, dtype: torch.dtype) -> torch.Tensor:
        """The rank's arena, flat."""
        return self.memory.arena(self.shard.rank, dtype)
