"""Host time of a step, measured without a GPU."""

from __future__ import annotations

import itertools
import json
import time
from importlib.util import find_spec

import pytest

from chorus.core.scheduling.scheduler import Scheduler
from chorus.perf.bench.host_time import exposed_prompts, main
from chorus.perf.bench.idle_engine import PacedDevice


def test_a_step_is_measured_with_and_without_adapters(tmp_path, capsys):
    assert main(["--rows", "1", "3", "--tokens", "40", "--steps", "4", "--work-dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(case["rows"], case["tokens"], case["lora"]) for case in found["cases"]] == [
        (1, 40, False), (1, 40, True), (3, 40, False), (3, 40, True),
    ]  # fmt: skip
    for case in found["cases"]:
        assert 0 < case["pages"] < case["execute"] < case["step"]
        assert case["exposed ahead"] >= 0
        assert case["exposed"] > 0
    if find_spec("triton"):
        assert sorted(found["layer"]) == ["adapter", "base", "mixed"]
        assert all(time > 0 for time in found["layer"].values())
        assert all(found["layer in pieces"][name] < time for name, time in found["layer"].items())


def test_a_paced_device_counts_the_time_in_which_it_has_nothing_to_do():
    clock = itertools.count()  # a second goes by with every look
    device = PacedDevice(10.0, lambda: float(next(clock)))
    replay = device.capture(lambda: None)
    done = device.event()
    replay()  # at 0, until 10
    done.record()
    replay()  # given at 1, begins at 10
    assert device.gaps == [0.0]
    done.synchronize()
    assert next(clock) == 11
    device.wait(23.0)
    replay()  # at 24
    assert device.gaps == [0.0, 4.0]


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_exposed_time_of_prompts_is_what_the_device_waits_for(tmp_path, monkeypatch):
    """A host that sleeps for 6 ms a step, beside a device with steps of 4 ms and of 200."""
    asleep = 0.0

    def slowed(inner):
        def call(*args, **kwargs):
            time.sleep(asleep)
            return inner(*args, **kwargs)

        return call

    for name in ("schedule", "foresee"):
        monkeypatch.setattr(Scheduler, name, slowed(getattr(Scheduler, name)))
    hidden = exposed_prompts(16, 2, 3, tmp_path, 0.2)
    assert hidden["exposed"] > 0.0
    assert hidden["exposed ahead"] == 0.0
    asleep = 0.006
    found = exposed_prompts(16, 2, 3, tmp_path, 0.004)
    assert found["exposed"] >= 6e3
    assert 2e3 <= found["exposed ahead"] < found["exposed"]


@pytest.mark.parametrize("argument", ["--rows", "--tokens"])
def test_what_cannot_be_is_refused(argument, tmp_path):
    with pytest.raises(SystemExit):
        main([argument, "none", "--work-dir", str(tmp_path)])
