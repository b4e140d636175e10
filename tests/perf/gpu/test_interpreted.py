"""Sections of the benchmark on the CUDA executor without a GPU: every test of `interpreted_sections.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_interpreted():
    """In a process of its own: kernels of a process that interprets can't be compiled."""
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "--timeout=0",
            "-p",
            "no:cacheprovider",
            str(HERE / "interpreted_sections.py"),
        ],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=HERE.parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
