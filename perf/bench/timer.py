"""Time of device work: graph replays between CUDA events on a GPU, a clock elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from ...graphs.device import CudaDevice

_MOST_CALLS = 200  # of a measurement


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds of one call: the median of `count`."""

    seconds: float
    count: int
    captured: bool = False
    """Whether replays of a graph were timed."""


def in_turns(work: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each gives in each round; every second round backwards, so that what drifts slowly meets all alike."""
    found: dict[str, list[float]] = {name: [] for name in work}
    for index in range(rounds):
        for name in [*work][:: -1 if index % 2 else 1]:
            found[name].append(work[name]())
    return found


def ratio(seconds: Mapping[str, list[float]], name: str, over: str) -> float:
    """Median of the ratios within a round."""
    return median(its / others for its, others in zip(seconds[name], seconds[over], strict=True))


class WallTimer:
    """A host clock around calls that return when their work is done. method: how it was timed, for the result file."""

    method = "host clock, no device"

    def __init__(self, repeats: int = 3, clock: Callable[[], float] = time.perf_counter) -> None:
        self._repeats = repeats
        self._clock = clock

    def time(self, work: Callable[[], Any], *, capture: bool = True) -> Sample:
        """Warm up, then time calls; nothing else may be using the device. capture: replays of a graph, if any."""
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
    """CUDA events around graph replays; eager calls where `work` can't be captured.

    seconds: about how long each measurement goes on, in all.
    """

    method = "CUDA events around graph replays (eager calls where 'captured' is false)"

    def __init__(self, seconds: float = 0.05, min_count: int = 5) -> None:
        self._seconds = seconds
        self._min_count = min_count
        self._device: CudaDevice | None = None  # made when it is needed: some only call

    def time(self, work: Callable[[], Any], *, capture: bool = True) -> Sample:
        call = self._capture(work) if capture else work
        call()
        first = self._once(call)
        count = min(_MOST_CALLS, max(self._min_count, int(self._seconds / max(first, 1e-7))))
        seconds = self._many(call, count)
        return Sample(median(seconds), count, capture)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def _capture(self, work: Callable[[], Any]) -> Callable[[], None]:
        """Capture one call as the engine captures steps, on a stream beside the default one; returns its replay.

        Not by `torch.cuda.graph`, which collects garbage first: hundreds of small cases would spend their time there.
        """
        torch.cuda.synchronize()  # what `work` reads was made on the default stream
        if self._device is None:
            self._device = CudaDevice(torch.cuda.current_device())
        return self._device.capture(work)

    def _once(self, call: Callable[[], Any]) -> float:
        return self._many(call, 1)[0]

    def _many(self, call: Callable[[], Any], count: int) -> list[float]:
        """Seconds of each of `count` calls that follow each other without a gap."""
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
        torch.cuda.synchronize()
        events[0].record()
        for event in events[1:]:
            call()
            event.record()
        torch.cuda.synchronize()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


Timer = WallTimer | CudaTimer
