"""Processor time of this process, of others, and of a hypervisor."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from chorus.perf.bench.machine import CpuSample, family, processor, queued_seconds


def test_a_family_is_a_process_and_its_descendants():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert {os.getpid(), child.pid} <= {process.pid for process in family([os.getpid()])}
        child.communicate(b"\n")


def test_a_hypervisor_takes_a_part_of_the_busy_time():
    """Ten seconds, of which something was to be done for four: the watched processes had two, the hypervisor one."""
    before = CpuSample(clock=100.0, busy=50.0, own=20.0, stolen=3.0)
    after = CpuSample(clock=110.0, busy=54.0, own=22.0, stolen=4.0)
    capacity = 10.0 * (os.cpu_count() or 1)
    assert after.foreign_share(before) == pytest.approx(2 / capacity)
    assert after.stolen_share(before) == pytest.approx(1 / capacity)
    assert after.speed(before) == pytest.approx(3 / 4)
    assert before.speed(before) == 1.0


def test_generations_of_one_name_are_told_apart(tmp_path):
    """A baseline of one is not held against times of the other."""
    info = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n\n"
    names = []
    for model in (1, 17):
        (tmp_path / "cpuinfo").write_text(info.format(model) * 2)
        names.append(processor(tmp_path / "cpuinfo"))
    assert names == ["AMD EPYC, family 25, model 1", "AMD EPYC, family 25, model 17"]


def test_waits_for_a_processor_are_counted_in_seconds(tmp_path):
    file = tmp_path / "schedstat"
    file.write_text("123 2500000000 7\n")
    assert queued_seconds(file) == 2.5
    assert queued_seconds(tmp_path / "none") == 0.0
    before = queued_seconds()
    assert 0 <= before <= queued_seconds()
