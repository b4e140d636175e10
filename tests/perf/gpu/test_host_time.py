"""Host time of a step, measured without a GPU."""

from __future__ import annotations

import json

import pytest

from chorus.perf.gpu.host_time import main


def test_a_step_is_measured_with_and_without_adapters(tmp_path, capsys):
    assert main(["--rows", "1", "3", "--tokens", "40", "--steps", "4", "--work-dir", str(tmp_path)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(case["rows"], case["tokens"], case["lora"]) for case in found["cases"]] == [
        (1, 40, False), (1, 40, True), (3, 40, False), (3, 40, True),
    ]  # fmt: skip
    for case in found["cases"]:
        assert 0 < case["pages"] < case["execute"] < case["step"]


@pytest.mark.parametrize("argument", ["--rows", "--tokens"])
def test_what_cannot_be_is_refused(argument, tmp_path):
    with pytest.raises(SystemExit):
        main([argument, "none", "--work-dir", str(tmp_path)])
