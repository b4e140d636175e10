"""The native sources compile without a warning."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(
    shutil.which("g++") is None or platform.machine() != "x86_64", reason="needs g++ for the processors that it is for"
)
def test_no_warnings():
    (module,) = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["ext-modules"]
    flags = module["extra-compile-args"]
    assert {"-Wall", "-Wextra"} <= set(flags) and "-w" not in flags
    assert "-ffp-contract=off" in flags, (
        "additions and multiplications are joined where the source says so, nowhere else"
    )
    command = ["g++", *flags, "-Werror", "-fsyntax-only", *module["sources"]]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
