"""Capture and replay of decode steps, keyed by (bucket, mode)."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Generic, TypeVar

Output = TypeVar("Output")


class StepMode(StrEnum):
    """base: no row has an adapter, so no LoRA work is captured and base traffic pays nothing for LoRA being on."""

    BASE = "base"
    LORA = "lora"


class GraphRunner(Generic[Output]):
    """Captures a step function once per key over static buffers, then replays it.

    `capture(bucket, mode)` returns the replayable step. On a CPU capturing is closing over the bucket's buffers and
    a replay is a call, so padding and staleness mistakes show there as they would with CUDA graphs.
    """

    def __init__(self, capture: Callable[[int, StepMode], Callable[[], Output]]) -> None:
        self._capture = capture
        self._captured: dict[tuple[int, StepMode], Callable[[], Output]] = {}

    @property
    def keys(self) -> tuple[tuple[int, StepMode], ...]:
        return tuple(self._captured)

    def replay(self, bucket: int, mode: StepMode) -> Output:
        """Run the step of (bucket, mode), capturing it first when it is new."""
        key = (bucket, mode)
        step = self._captured.get(key)
        if step is None:
            step = self._captured[key] = self._capture(bucket, mode)
        return step()
