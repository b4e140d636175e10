"""Capture once per key, replay ever after."""

from __future__ import annotations

import pytest

from chorus.graphs.runner import GraphRunner, StepMode


@pytest.fixture
def log():
    return []


@pytest.fixture
def runner(log):
    def capture(bucket, mode):
        log.append(("capture", bucket, mode))

        def step():
            log.append(("replay", bucket, mode))
            return bucket, mode

        return step

    return GraphRunner(capture)


def test_captures_once_per_key(runner, log):
    keys = [(4, StepMode.BASE), (4, StepMode.LORA), (8, StepMode.BASE), (4, StepMode.BASE), (8, StepMode.BASE)]
    assert [runner.replay(*key) for key in keys] == keys
    assert [entry[1:] for entry in log if entry[0] == "capture"] == keys[:3]
    assert [entry[1:] for entry in log if entry[0] == "replay"] == keys
    assert runner.keys == tuple(keys[:3])


def test_captures_before_the_first_replay(runner, log):
    runner.replay(2, StepMode.LORA)
    assert [entry[0] for entry in log] == ["capture", "replay"]


def test_failed_capture_is_tried_again():
    attempts = []

    def capture(bucket, mode):
        attempts.append(bucket)
        if len(attempts) == 1:
            raise RuntimeError("no memory")
        return lambda: "done"

    runner = GraphRunner(capture)
    with pytest.raises(RuntimeError, match="no memory"):
        runner.replay(1, StepMode.BASE)
    assert runner.keys == ()
    assert runner.replay(1, StepMode.BASE) == "done"
    assert attempts == [1, 1]


def test_reports_what_captures_took(log):
    free = iter((100, 70, 70, 90))  # another process may give memory back meanwhile
    runner = GraphRunner(lambda bucket, mode: lambda: None, lambda: next(free))
    first = runner.capture(4, StepMode.LORA)
    runner.replay(2, StepMode.BASE)
    assert runner.report == [first, runner.report[1]]
    assert [(step.bucket, step.mode, step.num_bytes) for step in runner.report] == [
        (4, StepMode.LORA, 30),
        (2, StepMode.BASE, 0),
    ]
    assert all(step.seconds >= 0 for step in runner.report)
    runner.replay(4, StepMode.LORA)
    assert len(runner.report) == 2, "a replay captures nothing"


def test_clear_gives_everything_up(runner, log):
    runner.replay(4, StepMode.BASE)
    runner.clear()
    assert runner.keys == ()
    assert runner.report == []
