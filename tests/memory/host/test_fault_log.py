"""A fault that comes again and again is logged when it begins and when it ends."""

from __future__ import annotations

import logging

import pytest

from chorus.memory.host.fault_log import BURST, LINE_SECONDS, FaultLog

logger = logging.getLogger("faults")


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def faults(clock, caplog):
    caplog.set_level(logging.WARNING)
    return FaultLog(logger, clock)


def texts(caplog):
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_a_fault_in_a_row_is_one_line(faults, caplog):
    for number in range(100):
        faults.failed("writes", "full", f"block {number} could not be written")
    assert [text.split(";")[0] for text in texts(caplog)] == ["block 0 could not be written"]
    faults.worked("writes")
    faults.worked("writes")
    assert texts(caplog) == ["writes: it works again, and failed 100 times"]


def test_kinds_and_reasons_are_told_apart(faults, caplog):
    for kind, reason in (("writes", "full"), ("reads", "full"), ("writes", "broken"), ("writes", "broken")):
        faults.failed(kind, reason, f"{kind} {reason}")
    assert [text.split(";")[0] for text in texts(caplog)] == ["writes full", "reads full", "writes broken"]
    faults.worked("others")
    assert texts(caplog) == []


def test_a_fault_that_comes_and_goes_does_not_fill_the_log(faults, clock, caplog):
    for _ in range(1000):
        faults.failed("reads", "broken", "broken")
        faults.worked("reads")
    assert len(texts(caplog)) == 2 * BURST
    clock.now += LINE_SECONDS
    for _ in range(1000):
        faults.failed("reads", "broken", "broken")
        faults.worked("reads")
    assert len(texts(caplog)) == 2
