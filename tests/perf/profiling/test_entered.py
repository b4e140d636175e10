"""Number of files that one must open to follow a decode step with LoRA."""

from __future__ import annotations

import pytest

from chorus.memory.files.strict_json import loads
from chorus.perf.profile.entered import entered, main, of_cpu


def test_counts_functions_of_the_engine_alone():
    assert entered(lambda: (loads(b"[1]"), sorted([2, 1], key=lambda value: -value))).keys() == {
        "memory/files/strict_json.py"
    }
    assert entered(lambda: None) == {}


@pytest.mark.parametrize(("kernels", "files"), [("native", 12), ("torch", 15)])
def test_a_decode_step_enters_few_files(kernels, files):
    assert len(of_cpu(kernels)) <= files


def test_prints_the_files(capsys):
    assert main(["--list"]) == 0
    assert "ops/native.py: NativeDecoder" in capsys.readouterr().out
