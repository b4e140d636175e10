"""TP ranks on a CPU: processes of one machine that compute shares of the same layers, and sum the results.

The native library computes the sums in shared memory (`native/ranks.h`), in the order of the ranks. So no bit depends
on which rank was first.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import Protocol

import torch

from ..library.native_library import library, required

#: About the time that waking a rank takes.
SPINNING_SECONDS = 50e-6

#: Values of the library's `Ranks::State`.
_FAILED, _LOST = 1, 2


class StepGivenUp(RuntimeError):
    """Another rank has aborted the step."""


class RanksLost(RuntimeError):
    """A rank has ended, or kept the others waiting for too long: these ranks no longer compute anything."""


class Collectives(Protocol):
    """Collective operations of one rank of `size`; all ranks call the same ones, in the same order."""

    @property
    def rank(self) -> int: ...
    @property
    def size(self) -> int: ...

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' parts; every rank gets the same bits, perhaps in place."""
        ...

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Gather `[rows, width]` float32 on the first rank; other ranks get no rows.

        Every rank has columns, beginning at `width · rank / size`.
        """
        ...

    def lead(self, values: torch.Tensor) -> None:
        """Copy the first rank's integers, from 0 to 2^24, to all ranks, in place."""
        ...

    def lose(self) -> None:
        """Stop this rank from ever waiting for the others again; thread-safe."""
        ...


class Ranks:
    """One rank of `size`, with memory that all ranks share.

    memory: of `num_bytes`, initially zeroed. floats: the most values summed at once, at least a rank's columns of a
    gathered row. seconds: how long a rank waits for the others before all are lost. spinning: seconds after which a
    waiting rank sleeps, and must be woken.
    """

    def __init__(
        self, memory: mmap.mmap, rank: int, size: int, floats: int, seconds: float, spinning: float = SPINNING_SECONDS
    ) -> None:
        self.rank, self.size = rank, size
        self._library = found = required()
        self._memory = ctypes.c_char.from_buffer(memory)  # stays mapped as long
        self.handle = found.chorus_ranks_create(ctypes.addressof(self._memory), rank, size, floats, seconds, spinning)

    @staticmethod
    def num_bytes(size: int, floats: int) -> int:
        found = library()
        return 0 if found is None else found.chorus_ranks_bytes(size, floats)

    def begin(self, step: int) -> None:
        """Begin a step after all ranks have left the previous one; step numbers grow."""
        self._library.chorus_ranks_begin(self.handle, step)

    def add_up(self, part: torch.Tensor) -> torch.Tensor:
        """Sum all ranks' parts in float32, perhaps in place. Raises StepGivenUp and RanksLost."""
        total = part.to(torch.float32).contiguous()
        self._check(self._library.chorus_ranks_add_up(self.handle, total.data_ptr(), total.numel()))
        return total.to(part.dtype)

    def gather(self, part: torch.Tensor, width: int) -> torch.Tensor:
        """Gather `[rows, width]` float32 from every rank's columns on the first rank; other ranks get no rows.

        Raises StepGivenUp and RanksLost.
        """
        part = part.to(torch.float32).contiguous()
        rows = torch.empty(0 if self.rank else len(part), width)
        out = None if self.rank else rows.data_ptr()
        self._check(self._library.chorus_ranks_gather(self.handle, part.data_ptr(), len(part), width, out))
        return rows

    def lead(self, values: torch.Tensor) -> None:
        """See `Collectives.lead`; float32 can represent such integers. Raises StepGivenUp and RanksLost."""
        values.copy_(self.add_up(torch.zeros(values.shape) if self.rank else values.to(torch.float32)))

    def meet(self) -> None:
        """Wait until all ranks have written their parts of a collective. Raises StepGivenUp and RanksLost."""
        self._check(self._library.chorus_ranks_meet(self.handle))

    def count(self) -> int:
        """Count the next collective of a rank that is a device, and return its number.

        The device itself announces, in `word`, that its part is written, and waits for the others' words.
        """
        return self._library.chorus_ranks_count(self.handle)

    def word(self, rank: int) -> int:
        """Address of an int64: the last collective for which a rank has written its part."""
        return self._library.chorus_ranks_word(self.handle, rank)

    @property
    def num_sums(self) -> int:
        """Number of collectives so far in the step."""
        return self._library.chorus_ranks_sums(self.handle)

    @property
    def mine(self) -> int:
        """Address of this rank's part of the next collective."""
        return self._library.chorus_ranks_mine(self.handle)

    def part(self, rank: int) -> int:
        """Address of a rank's part of the collective that `meet` waited for."""
        return self._library.chorus_ranks_part(self.handle, rank)

    def check(self) -> None:
        """Raise StepGivenUp or RanksLost if a collective of this step may be incomplete."""
        self._check(self._library.chorus_ranks_state(self.handle))

    def fail(self, step: int) -> None:
        """Make all ranks leave a step; thread-safe."""
        self._library.chorus_ranks_fail(self.handle, step)

    def lose(self) -> None:
        """Make all ranks leave this step and never wait again; thread-safe."""
        self._library.chorus_ranks_lose(self.handle)

    def _check(self, state: int) -> None:
        if state == _LOST:
            raise RanksLost("a rank has ended or kept the others waiting for too long")
        if state == _FAILED:
            raise StepGivenUp("another rank has aborted the step")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._library.chorus_ranks_destroy(self.handle)
            self.handle = None
