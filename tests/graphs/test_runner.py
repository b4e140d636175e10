"""Capture once per key, replay ever after."""

from __future__ import annotations

import pytest

from chorus.graphs.runner import GraphRunner, StepForm, StepMode

BASE, LORA = StepForm(StepMode.BASE), StepForm(StepMode.LORA)


@pytest.fixture
def log():
    return []


@pytest.fixture
def runner(log):
    def capture(bucket, form):
        log.append(("capture", bucket, form))

        def step():
            log.append(("replay", bucket, form))
            return bucket, form

        return step

    return GraphRunner(capture)


def test_captures_once_per_key(runner, log):
    keys = [(4, BASE), (4, LORA), (8, BASE), (4, BASE), (8, BASE)]
    assert [runner.replay(*key) for key in keys] == keys
    assert [entry[1:] for entry in log if entry[0] == "capture"] == keys[:3]
    assert [entry[1:] for entry in log if entry[0] == "replay"] == keys
    assert runner.keys == tuple(keys[:3])


def test_captures_before_the_first_replay(runner, log):
    runner.replay(2, LORA)
    assert [entry[0] for entry in log] == ["capture", "replay"]


def test_failed_capture_is_tried_again():
    attempts = []

    def capture(bucket, form):
        attempts.append(bucket)
        if len(attempts) == 1:
            raise RuntimeError("no memory")
        return lambda: "done"

    runner = GraphRunner(capture)
    with pytest.raises(RuntimeError, match="no memory"):
        runner.replay(1, BASE)
    assert runner.keys == ()
    assert runner.replay(1, BASE) == "done"
    assert attempts == [1, 1]


def test_reports_what_captures_took(log):
    free = iter((100, 70, 70, 90))  # another process may give memory back meanwhile
    runner = GraphRunner(lambda bucket, form: lambda: None, lambda: next(free))
    first = runner.capture(4, LORA)
    runner.replay(2, BASE)
    assert runner.report == [first, runner.report[1]]
    assert [(step.bucket, step.form, step.num_bytes) for step in runner.report] == [
        (4, LORA, 30),
        (2, BASE, 0),
    ]
    assert all(step.seconds >= 0 for step in runner.report)
    runner.replay(4, LORA)
    assert len(runner.report) == 2, "a replay captures nothing"


def test_clear_gives_everything_up(runner, log):
    runner.replay(4, BASE)
    runner.clear()
    assert runner.keys == ()
    assert runner.report == []
