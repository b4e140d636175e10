"""The native sources compile without a warning, and what was installed was built from them."""

from __future__ import annotations

import platform
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from chorus.ops import native_library

ROOT = Path(__file__).parents[2]


pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or (platform.system(), platform.machine()) != ("Linux", "x86_64"),
    reason="needs g++ on a system that the native library is for",
)


def test_where_there_is_a_compiler_there_is_the_library():
    """An installation without it goes on with torch's operators, and tests of the library skip: a broken build would
    not be seen. On a processor without AVX-512 the library is there, and not used.
    """
    assert native_library.library() is not None, (
        "pip install -e . did not build chorus.ops._native, or from other sources"
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
