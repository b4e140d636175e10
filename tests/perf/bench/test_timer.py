"""Times are of the work, by whatever clock."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch

from chorus.perf.bench.timer import CudaTimer, WallTimer, in_turns, ratio

from ...graphs.fake_graphs import fake_graphs


def test_median_of_the_calls_after_a_warm_up():
    took = iter([5.0, 1.0, 9.0])
    ticks = iter(accumulate(step for seconds in took for step in (0.5, seconds)))
    calls = []
    sample = WallTimer(repeats=3, clock=lambda: next(ticks)).time(lambda: calls.append(1))
    assert (sample.seconds, sample.count, sample.captured) == (5.0, 3, False)
    assert len(calls) == 4


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
    """The part of torch.cuda that the timer uses; a record of its calls."""
    pools = fake_graphs(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: FakeEvent())
    return pools.log


def test_replays_are_timed(cuda):
    sample = CudaTimer(seconds=0.1, min_count=2).time(lambda: cuda.append("work"))
    assert cuda[:5] == ["work", "begin", "work", "end", "replay"], (
        "compiled before it is captured, replayed once unmeasured"
    )
    assert set(cuda[5:]) == {"replay"}
    assert (sample.seconds, sample.count, sample.captured) == (0.02, 5, True)
    assert len(cuda[5:]) == 1 + 5


def test_short_work_is_repeated_within_a_replay(cuda, monkeypatch):
    """A launch of a replay for each product of 5 µs would be what is measured."""

    def elapsed(self, after):
        repeats = cuda[: cuda.index("replay")].count("work") // 2 if cuda.count("begin") == 1 else 200
        return 0.005 * repeats * (after.at - self.at)

    monkeypatch.setattr(FakeEvent, "elapsed_time", elapsed)
    sample = CudaTimer(seconds=0.01, min_count=2).time(lambda: cuda.append("work"))
    assert cuda.count("begin") == 2
    last = len(cuda) - 1 - cuda[::-1].index("begin")
    assert cuda[last + 1 : cuda.index("end", last)] == ["work"] * 200
    assert sample.seconds == pytest.approx(5e-6)
    assert sample.count == 10


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


def test_measurements_follow_each_other_though_their_graphs_are_gone(cuda):
    timer = CudaTimer(seconds=0.0, min_count=1)
    for _ in range(3):
        assert timer.time(lambda: cuda.append("work")).captured


def test_a_capture_follows_one_that_failed(cuda):
    timer = CudaTimer(seconds=0.0, min_count=1)

    def work() -> None:
        if "begin" in cuda:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        timer.time(work)
    assert timer.time(lambda: None).captured


def test_turns_go_back_every_second_round():
    log = []
    values = {"a": iter([1.0, 3.0, 8.0]), "b": iter([2.0, 2.0, 4.0])}

    def work(name):
        log.append(name)
        return next(values[name])

    found = in_turns({name: lambda name=name: work(name) for name in values}, 3)
    assert "".join(log) == "abbaab"
    assert found == {"a": [1.0, 3.0, 8.0], "b": [2.0, 2.0, 4.0]}
    assert ratio(found, "a", "b") == 1.5, "of 0.5, 1.5 and 2"
