"""Other processes on this machine: what they take, not what this one takes."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from chorus.perf.simulate.neighbours import Neighbours

BURN = "import time\nwhile time.process_time() < 0.4: pass"


def burn(seconds: float) -> None:
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


@pytest.fixture
def stat(tmp_path, monkeypatch):
    """Write a /proc/stat of this process's own time and so many seconds of others', beside half a minute of idling."""
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    ticks, began = os.sysconf("SC_CLK_TCK"), time.process_time()

    def write(user: float, stolen: float = 0.0):
        own = round(ticks * (time.process_time() - began + user))
        (tmp_path / "stat").write_text(f"cpu  {own} 0 0 {30 * ticks} 0 0 0 {round(ticks * stolen)} 0 0\ncpu0 9 9 9\n")
        return tmp_path / "stat"

    return write


def test_what_others_and_the_host_took(stat, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    neighbours = Neighbours(stat(0.0))
    now += 10.0
    burn(0.2)
    stat(0.0)
    assert neighbours.share() < 0.01, "this process's own time counts for nothing"
    stat(1.0, 3.0)
    assert neighbours.share() == pytest.approx(4.0 / 20.0, abs=0.01)


def test_own_children_are_no_others(stat, monkeypatch):
    now = 100.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    neighbours = Neighbours(stat(0.0))
    subprocess.run([sys.executable, "-c", BURN], check=True)
    now += 1.0
    stat(0.4)
    assert neighbours.share() < 0.03


def test_a_system_that_does_not_say(tmp_path):
    assert Neighbours(tmp_path / "none").share() == 0.0
