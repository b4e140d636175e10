"""Ranks: processes of one machine that compute shares of the same layers, and add up what these give.

The sums are made in memory that the processes share, by the native library (`native/ranks.h`): in the order of the
ranks, so that no bit depends on which of them was first.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

import torch

from .native_library import library

MOST_RANKS = 64

#: About as long as waking a rank takes.
SPINNING_SECONDS = 50e-6

#: What `Ranks::State` of the library says.
_FAILED, _LOST = 1, 2


class StepGivenUp(RuntimeError):
    """Another rank has given up the step."""


class RanksLost(RuntimeError):
    """A rank has ended, or kept the others waiting for too long: these ranks compute nothing any more."""


class Collectives(Protocol):
    """What one rank of `size` computes together with the others: each calls the same, in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, the same bits on each, maybe in place."""
        ...

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """The rows `[rows, width]` float32 of which every rank has columns, from `width · rank / size` on, on the first
        rank; on others no rows.
        """
        ...

    def lead(self, values: torch.Tensor) -> None:
        """Have the first rank's integers, from 0 to 2^24, on all ranks, in place."""
        ...

    def lose(self) -> None:
        """Have this rank never wait for the others again; from any thread."""
        ...


class Ranks:
    """One rank of `size`, with memory that all of them have.

    memory: as `num_bytes` says, zeroed at first. floats: the most that are added up at once, at least a rank's columns
    of a row that is gathered. seconds: how long a rank waits for the others; then all are lost. spinning: seconds after
    which a rank that waits sleeps, and has to be woken.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, size: int, floats: int, seconds: float, spinning: float = SPINNING_SECONDS
    ) -> None:
        found = library()
        if found is None:
            raise RuntimeError("the native library is not built; reinstall chorus with a C++ compiler")
        self.rank, self.size = rank, size
        self._library = found
        self._memory = ctypes.c_char.from_buffer(memory)  # which stays mapped for as long
        self.handle = found.chorus_ranks_create(ctypes.addressof(self._memory), rank, size, floats, seconds, spinning)

    @staticmethod
    def num_bytes(size: int, floats: int) -> int:
        found = library()
        return 0 if found is None else found.chorus_ranks_bytes(size, floats)

    def begin(self, step: int) -> None:
        """Begin a step, whose number grows, after all ranks have left the one before."""
        self._library.chorus_ranks_begin(self.handle, step)

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' parts, added up in float32, maybe in place. Raises StepGivenUp and RanksLost."""
        total = part.to(torch.float32).contiguous()
        self._check(self._library.chorus_ranks_add_up(self.handle, total.data_ptr(), total.numel()))
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """The rows `[rows, width]` float32 of which every rank has columns, on the first rank; on others no rows.

        Raises StepGivenUp and RanksLost.
        """
        part = part.to(torch.float32).contiguous()
        rows = torch.empty(0 if self.rank else len(part), width)
        out = None if self.rank else rows.data_ptr()
        self._check(self._library.chorus_ranks_gather(self.handle, part.data_ptr(), len(part), width, out))
        return rows

    def lead(self, values: torch.Tensor) -> None:
        """See `Collectives.lead`; float32 holds such integers. Raises StepGivenUp and RanksLost."""
        values.copy_(self.add_up(torch.zeros(values.shape) if self.rank else values.to(torch.float32)))

    def meet(self) -> None:
        """Wait until all ranks have written their parts of a sum. Raises StepGivenUp and RanksLost."""
        self._check(self._library.chorus_ranks_meet(self.handle))

    def post(self) -> None:
        """Say that this rank's part is written, and wait for none of the others'."""
        self._library.chorus_ranks_post(self.handle)

    def count(self) -> int:
        """Count the next sum of a rank that a device is, which says itself, in `word`, that its part is written, and
        waits for the others' words. Returns the number of the sum.
        """
        return self._library.chorus_ranks_count(self.handle)

    def word(self, rank: int) -> int:
        """Address of an int64: the last sum that a rank has written its part of."""
        return self._library.chorus_ranks_word(self.handle, rank)

    @property
    def num_sums(self) -> int:
        """Sums so far in the step."""
        return self._library.chorus_ranks_sums(self.handle)

    @property
    def mine(self) -> int:
        """Address of this rank's part of the next sum."""
        return self._library.chorus_ranks_mine(self.handle)

    def part(self, rank: int) -> int:
        """Address of a rank's part of the sum that `meet` was for."""
        return self._library.chorus_ranks_part(self.handle, rank)

    def check(self) -> None:
        """Raise StepGivenUp or RanksLost if a sum of this step may be none."""
        self._check(self._library.chorus_ranks_state(self.handle))

    def fail(self, step: int) -> None:
        """Have all ranks leave a step; from any thread."""
        self._library.chorus_ranks_fail(self.handle, step)

    def lose(self) -> None:
        """Have all ranks leave this step and never wait again; from any thread."""
        self._library.chorus_ranks_lose(self.handle)

    def _check(self, state: int) -> None:
        if state == _LOST:
            raise RanksLost("a rank has ended or kept the others waiting for too long")
        if state == _FAILED:
            raise StepGivenUp("another rank has given up the step")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.chorus_ranks_destroy(self.handle)
            self.handle = None
