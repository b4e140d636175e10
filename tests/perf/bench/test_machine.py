"""The processes of a family, and the processor's name."""

from __future__ import annotations

import os
import subprocess
import sys

from chorus.perf.bench.machine import family, processor


def test_a_family_is_a_process_and_its_descendants():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        assert {os.getpid(), child.pid} <= {process.pid for process in family([os.getpid()])}
        child.communicate(b"\n")


def test_generations_of_one_name_are_told_apart(tmp_path):
    """A baseline of one is not held against times of the other."""
    info = "processor\t: 0\nvendor_id\t: AuthenticAMD\ncpu family\t: 25\nmodel\t\t: {}\nmodel name\t: AMD EPYC\n\n"
    names = []
    for model in (1, 17):
        (tmp_path / "cpuinfo").write_text(info.format(model) * 2)
        names.append(processor(tmp_path / "cpuinfo"))
    assert names == ["AMD EPYC, family 25, model 1", "AMD EPYC, family 25, model 17"]
