"""Products by AMX's tile registers, with registers in plain C++ as the manual defines them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from chorus.ops.library import native_library

SOURCES = Path(native_library.__file__).parents[1] / "native"
PROGRAM = Path(__file__).parent / "native_tiles.cpp"


@pytest.mark.wide
@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
def test_products_by_tiles(tmp_path):
    """Exact where sums are, near float64 elsewhere, and a row's bits don't depend on the other rows. The test of the
    processor that the library makes before it uses its tiles detects wrong ones.
    """
    program = tmp_path / "tiles"
    flags = ["-std=c++17", "-O1", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    subprocess.run(["g++", *flags, f"-I{SOURCES}", PROGRAM, "-o", program], check=True)
    lines = subprocess.run([program], check=True, capture_output=True, text=True).stdout.splitlines()
    said = dict(line.split() for line in lines)
    assert (said["exact"], said["wrong"], said["alone"]) == ("1", "1", "1")
    assert 0 < float(said["worst"]) < 1e-6  # of the sum of the products' sizes
