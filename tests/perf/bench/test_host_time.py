"""Host time of a step, measured without a GPU."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from chorus.perf.bench.host_time import main, timed


@pytest.mark.wide
def test_a_step_is_measured_with_and_without_adapters(tmp_path, capsys):
    assert main(["--rows", "1", "3", "--tokens", "40", "--steps", "4", "--work-dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(case["rows"], case["tokens"], case["lora"]) for case in found["cases"]] == [
        (1, 40, False),
        (1, 40, True),
        (3, 40, False),
        (3, 40, True),
    ]
    for case in found["cases"]:
        assert 0 < case["pages"] < case["execute"] < case["step"]
    if find_spec("triton"):
        assert sorted(found["layer"]) == ["adapter", "base", "mixed"]
        assert all(time > 0 for time in found["layer"].values())
        assert all(found["layer in pieces"][name] < time for name, time in found["layer"].items())


@pytest.mark.parametrize("argument", ["--rows", "--tokens"])
def test_what_cannot_be_is_refused(argument, tmp_path):
    with pytest.raises(SystemExit):
        main([argument, "none", "--work-dir", str(tmp_path)])


def test_calls_of_methods_are_timed_and_left_as_they_were():
    class Part:
        def double(self, value: int, *, more: int = 0) -> int:
            return 2 * value + more

    part, ticks = Part(), iter([1.0, 4.0, 10.0, 11.0])
    with timed({"doubled": (part, "double")}, lambda: next(ticks)) as took:
        assert part.double(2, more=1) == 5
        assert part.double(3) == 6
    assert took == {"doubled": [3.0, 1.0]}
    assert "double" not in vars(part)
