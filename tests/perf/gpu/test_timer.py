"""Times are of the work, by whatever clock."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import accumulate

import pytest
import torch

from chorus.perf.gpu.timer import CudaTimer, WallTimer


def test_median_and_best_of_the_calls_after_a_warm_up():
    took = iter([5.0, 1.0, 9.0])
    ticks = iter(accumulate(step for seconds in took for step in (0.5, seconds)))
    calls = []
    sample = WallTimer(repeats=3, clock=lambda: next(ticks)).time(lambda: calls.append(1))
    assert (sample.seconds, sample.best, sample.count, sample.captured) == (5.0, 1.0, 3, False)
    assert len(calls) == 4


class FakeGraph:
    """Counts what a CUDA graph would do."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        assert capture_error_mode == "thread_local"
        self._log.append("begin")

    def capture_end(self) -> None:
        self._log.append("end")

    def replay(self) -> None:
        self._log.append("replay")


class FakeEvent:
    """A tick per record."""

    ticks = 0

    def record(self) -> None:
        FakeEvent.ticks += 1
        self.at = FakeEvent.ticks

    def elapsed_time(self, after: FakeEvent) -> float:
        """Milliseconds."""
        return 20.0 * (after.at - self.at)


@pytest.fixture
def cuda(monkeypatch) -> list[str]:
    """torch.cuda as far as the timer uses it; what it was asked."""
    log: list[str] = []
    for name, value in {
        "Stream": object, "stream": lambda stream: nullcontext(), "synchronize": lambda: None,
        "graph_pool_handle": lambda: 0, "CUDAGraph": lambda: FakeGraph(log), "Event": lambda enable_timing: FakeEvent(),
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    return log


def test_replays_are_timed(cuda):
    sample = CudaTimer(seconds=0.1, min_count=2).time(lambda: cuda.append("work"))
    assert cuda[:5] == ["work", "begin", "work", "end", "replay"], (
        "compiled before it is captured, replayed once unmeasured"
    )
    assert set(cuda[5:]) == {"replay"}
    assert (sample.seconds, sample.best, sample.count, sample.captured) == (0.02, 0.02, 5, True)
    assert len(cuda[5:]) == 1 + 5


def test_what_is_not_captured_is_called(cuda):
    sample = CudaTimer(seconds=0.0, min_count=3).time(lambda: cuda.append("work"), capture=False)
    assert set(cuda) == {"work"}
    assert (sample.count, sample.captured) == (3, False)


def test_a_capture_that_fails_leaves_capture_mode(cuda):
    def work() -> None:
        cuda.append("work")
        if "begin" in cuda:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        CudaTimer().time(work)
    assert cuda == ["work", "begin", "work", "end"]
