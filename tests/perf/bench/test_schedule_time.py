"""Loads of the benchmark of `schedule()` match their names, however few steps are measured."""

from __future__ import annotations

import itertools

import pytest

from chorus.perf.bench import schedule_time
from chorus.perf.bench.schedule_time import STATES, Load, schedule_times


@pytest.mark.parametrize("load", [Load(32, 60, 100, 20), Load(8, 60, 4, 20)])
def test_every_state_is_reached_in_one_step(load):
    """With adapters that few of the first requests find read, and with fewer adapters than requests that run."""
    found = schedule_times(load, 1, clock=itertools.count().__next__)
    assert found == {**dict.fromkeys(STATES, 1), "slowest": 1}


def test_requests_that_end_while_they_are_measured_are_an_error(monkeypatch):
    monkeypatch.setattr(schedule_time, "_max_tokens", lambda steps: 3)
    with pytest.raises(RuntimeError, match=r"full: \d+ rows ran and \d+ of 9 requests wait"):
        schedule_times(Load(8, 9, 100, 1), 60)
