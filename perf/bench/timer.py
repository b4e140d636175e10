"""Time of device work: graph replays between CUDA events on a GPU, a clock elsewhere."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import torch

from ...graphs.device import CudaDevice

_MOST_CALLS = 200  # seconds of a measurement

#: A replay takes at least this long, by repeating the work in it: the launch of a replay takes microseconds itself.
_LEAST_REPLAY = 1e-3
_MOST_REPEATS = 1000

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one call: the median of `count`."""

    seconds: float
    count: int
    captured: bool = False
    """Replays of a graph were timed."""


def in_turns(work: Mapping[str, Callable[[], Result]], rounds: int) -> dict[str, list[Result]]:
    """Results of each in each round; every second round runs in reverse order, so slow drift affects all alike."""
    found: dict[str, list[Result]] = {name: [] for name in work}
    for index in range(rounds):
        for name in [*work][:: -1 if index % 2 else 1]:
            found[name].append(work[name]())
    return found


def ratio(seconds: Mapping[str, list[float]], name: str, over: str) -> float:
    """Median of the ratios within a round."""
    return median(its / others for its, others in zip(seconds[name], seconds[over], strict=True))


class WallTimer:
    """A host clock around calls that return when their work is done. method: description for the result file."""

    method = "host clock, no device"

    def __init__(self, repeats: int = 3, clock: Callable[[], float] = time.perf_counter) -> None:
        self._repeats = repeats
        self._clock = clock

    def time(self, work: Callable[[], Any], *, capture: bool = True) -> Sample:
        """Warm up, then time calls; nothing else may be using the device. capture: use graph replays, if possible."""
        work()
        seconds = []
        for _ in range(self._repeats):
            began = self._clock()
            work()
            seconds.append(self._clock() - began)
        return Sample(median(seconds), len(seconds))

    def synchronize(self) -> None:
        """Calls have ended when they return."""


class CudaTimer:
    """CUDA events around graph replays; eager calls if `work` can't be captured.

    Short work is captured several times, so that a replay takes a millisecond.

    seconds: approximate total time of each measurement.
    """

    method = "CUDA events around graph replays (eager calls where 'captured' is false)"

    def __init__(self, seconds: float = 0.05, min_count: int = 5) -> None:
        self._seconds = seconds
        self._min_count = min_count
        self._device: CudaDevice | None = None  # made when needed: some callers only use calls

    def time(self, work: Callable[[], Any], *, capture: bool = True) -> Sample:
        call, repeats = (self._capture(work) if capture else work), 1
        call()
        first = self._once(call)
        if capture and first < _LEAST_REPLAY:
            repeats = min(_MOST_REPEATS, math.ceil(_LEAST_REPLAY / max(first, 1e-7)))
            call = self._capture(lambda: [work() for _ in range(repeats)])
            call()
            first = self._once(call)
        count = min(_MOST_CALLS, max(self._min_count, int(self._seconds / max(first, 1e-7))))
        seconds = self._many(call, count)
        return Sample(median(seconds) / repeats, count, capture)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def _capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Capture one call like the engine captures steps, on a separate stream; returns its replay.

        It does not use `torch.cuda.graph`, which collects garbage first: that would dominate the time of hundreds of
        small cases.
        """
        torch.cuda.synchronize()  # the inputs of `work` were made on the default stream
        if self._device is None:
            self._device = CudaDevice(torch.cuda.current_device())
        return self._device.capture(work)

    def _once(self, call: Callable[[], Any]) -> float:
        return self._many(call, 1)[0]

    def _many(self, call: Callable[[], Any], count: int) -> list[float]:
        """Seconds of each of `count` calls without gaps between them."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


Timer = WallTimer | CudaTimer
