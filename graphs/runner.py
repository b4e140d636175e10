"""Decode steps by batch size and mode: the sizes that they are padded to, capture and replay."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, NoReturn, TypeVar

Output = TypeVar("Output")


def padded(num_rows: int) -> int:
    """Return the bucket for more than 64 sequences, without the limit of `max_num_seqs`."""
    step = 1 << (num_rows - 1).bit_length() - 4
    return -(-num_rows // step) * step


class DecodeBuckets:
    """1, 2, 4, 8, 16, 24, … 128, 144, … 256, 288, … ending exactly at `max_num_seqs`.

    Buckets are 8 apart, and from 64 on an eighth of the power of two below. Therefore at most an eighth is padding, and
    the number of graphs, with their time and memory, grows logarithmically.
    """

    def __init__(self, max_num_seqs: int) -> None:
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs is {max_num_seqs}; at least 1 is needed")
        ladder, size = [1, 2, 4], 8
        while size < max_num_seqs:
            ladder.append(size)
            size += max(8, 1 << size.bit_length() - 4)
        self.sizes = tuple(sorted({size for size in [*ladder, max_num_seqs] if size <= max_num_seqs}))

    def pick(self, num_rows: int) -> int:
        """Return the smallest bucket that holds `num_rows` sequences. Raises ValueError above the largest."""
        index = bisect_left(self.sizes, num_rows)
        if num_rows < 1 or index == len(self.sizes):
            raise ValueError(f"no bucket holds {num_rows} sequences; the largest holds {self.sizes[-1]}")
        return self.sizes[index]


class StepMode(StrEnum):
    """How a step applies adapters."""

    BASE = "base"
    """No sequence has an adapter: no LoRA work is captured, so base traffic pays nothing for LoRA."""
    LORA = "lora"
    VECTORS = "vectors"
    """For captured launches only: a step in which an adapter scales and shifts outputs. A captured `LORA` step then has
    no launches for that. Captured when the first such step runs.
    """
    MERGED = "merged"
    """One adapter is merged into a copy of the weights; sequences of other adapters add the difference."""
    MIXTURE = "mixture"
    """For captured launches only: a merged step with such sequences. A captured `MERGED` step then has no LoRA work."""


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """The cost of capturing a step: seconds, and bytes of device memory."""

    bucket: int
    mode: StepMode
    seconds: float
    num_bytes: int


class GraphRunner(Generic[Output]):
    """Captures a step function once per key over static buffers, then replays it.

    `capture(bucket, mode)` returns the replayable step. On a CPU, capturing is a closure over the bucket's buffers and
    a replay is a call. Therefore mistakes of padding and staleness show there as they would with CUDA graphs.
    """

    def __init__(
        self, capture: Callable[[int, StepMode], Callable[[], Output]], free_bytes: Callable[[], int] = lambda: 0
    ) -> None:
        """free_bytes: returns free device memory, to measure the memory of a capture."""
        self._capture = capture
        self._free_bytes = free_bytes
        self._captured: dict[tuple[int, StepMode], Callable[[], Output]] = {}
        self.report: list[CapturedStep] = []

    @property
    def keys(self) -> tuple[tuple[int, StepMode], ...]:
        return tuple(self._captured)

    def capture(self, bucket: int, mode: StepMode) -> CapturedStep:
        """Capture the step of (bucket, mode) now. Capture the largest buckets first, so smaller ones reuse their
        memory.
        """
        self._new(bucket, mode)
        return self.report[-1]

    def replay(self, bucket: int, mode: StepMode) -> Output:
        """Run the step of (bucket, mode), capturing it first if it is new."""
        step = self._captured.get((bucket, mode))
        if step is None:
            step = self._new(bucket, mode)
        return step()

    def clear(self) -> None:
        """Drop every captured step and the report."""
        self._captured.clear()
        self.report.clear()

    def close(self) -> None:
        """Drop every captured step and the capturing function. Without that cycle the owner of this runner is freed at
        once, instead of by the garbage collector.
        """
        self.clear()
        self._capture = _closed

    def _new(self, bucket: int, mode: StepMode) -> Callable[[], Output]:
        free, begin = self._free_bytes(), time.perf_counter()
        step = self._captured[bucket, mode] = self._capture(bucket, mode)
        seconds = time.perf_counter() - begin
        self.report.append(CapturedStep(bucket, mode, seconds, max(0, free - self._free_bytes())))
        return step


def _closed(bucket: int, mode: StepMode) -> NoReturn:
    raise RuntimeError(f"the step of bucket {bucket} ({mode}) was requested after the executor was closed")
