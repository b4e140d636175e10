"""Number of files that one must open to follow a decode step with LoRA."""

from __future__ import annotations

import pytest
import torch

from chorus.memory.files.strict_json import loads
from chorus.ops.library import native_library

from .entered import entered, main, of_completion, of_cpu


def test_counts_functions_of_the_engine_alone():
    assert entered(lambda: (loads(b"[1]"), sorted([2, 1], key=lambda value: -value))).keys() == {
        "memory/files/strict_json.py"
    }
    assert entered(lambda: None) == {}


@pytest.mark.parametrize(
    ("kernels", "arrives", "most"),
    [("native", False, 11), ("torch", False, 27), ("native", True, 27), ("torch", True, 41)],
)
def test_a_step_enters_few_files(kernels, arrives, most):
    """Of torch, seven are ops: a file for each noun that `chorus models --program` prints."""
    assert len(of_cpu(kernels, arrives)) <= most


def test_a_warm_completion_enters_few_files_of_scheduling():
    assert sum(path.startswith("core/scheduling/") for path in of_completion()) <= 9


def test_prints_the_files(capsys):
    assert main(["--list"]) == 0
    out = capsys.readouterr().out
    assert "core/model/decoder.py: DecoderModel" in out
    assert ("ops/cpu/native.py: NativeDecoder" in out) == native_library.available(torch.float32)
