"""Sections of the benchmark on the CUDA executor without a GPU: every test of `interpreted_sections.py`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from ...processes import PYTEST, run_python

SECTIONS = Path(__file__).parent / "interpreted_sections.py"


@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.long
def test_interpreted():
    """In a process of its own: kernels of a process that interprets can't be compiled."""
    result = run_python(*PYTEST, str(SECTIONS), TRITON_INTERPRET="1")
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
