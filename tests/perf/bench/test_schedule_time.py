"""Loads of the benchmark of `schedule()`: they are what their names say, however few steps are measured."""

from __future__ import annotations

import itertools

import pytest

from chorus.perf.cpu.schedule_time import STATES, Load, schedule_times


@pytest.mark.parametrize("load", [Load(32, 60, 100, 20), Load(8, 60, 4, 20)])
def test_every_state_is_reached_in_one_step(load):
    """With adapters that few of the first requests find read, and with fewer adapters than requests that run."""
    found = schedule_times(load, 1, clock=itertools.count().__next__)
    assert found == {**dict.fromkeys(STATES, 1), "slowest": 1}


def test_a_queue_that_ends_too_soon_is_refused():
    with pytest.raises(RuntimeError, match="turnover: all requests have ended"):
        schedule_times(Load(8, 1, 100, 1), 60)
