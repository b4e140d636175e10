"""Sections of the benchmark on the CUDA executor without a GPU: every test of `interpreted_sections.py`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

SECTIONS = Path(__file__).parent / "interpreted_sections.py"


@pytest.mark.timeout(1200)
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.beside("-m", "pytest", "-q", "--timeout=0", "-p", "no:cacheprovider", str(SECTIONS))
def test_interpreted(interpreted):
    """In a process of its own: kernels of a process that interprets can't be compiled."""
    assert interpreted.returncode == 0, interpreted.stdout[-8000:] + interpreted.stderr[-2000:]
