"""The published files: the check of wheels, and the levels that it asks for."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from chorus.core.model.families.defaults import FILE
from chorus.ops.library import native_library

ROOT = Path(__file__).parents[1]
CHECK = ROOT / ".github" / "wheel_levels.py"
X86 = ("amx", "avx2", "avx512", "avx512bf16")


@pytest.mark.parametrize(
    ("levels", "more", "architecture", "said"),
    [
        (X86, [], "x86_64", ""),
        (X86[:3], [], "x86_64", "has no library for avx512bf16"),
        ((), [], "x86_64", "has no library for amx"),
        (("neon", *X86), [], "aarch64", ""),
        (X86, [], "aarch64", "has no library for neon"),
        (X86, ["tests/test_imports.py"], "x86_64", "ships tests/test_imports.py"),
        ((), [], "any", "is for none of"),
    ],
)
def test_a_wheel_holds_every_level_of_its_architecture_and_no_tests(tmp_path, levels, more, architecture, said):
    wheel = tmp_path / f"chorus_lora-1-cp311-cp311-manylinux_2_28_{architecture}.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        for name in [*(f"chorus/ops/_native_{level}.cpython-311-linux-gnu.so" for level in levels), *more]:
            files.writestr(name, "")
    found = subprocess.run([sys.executable, CHECK, wheel], capture_output=True, text=True, check=False)
    assert found.returncode == bool(said)
    assert said in found.stderr


def test_every_level_that_is_built_is_asked_for():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    asked = CHECK.read_text()
    assert all(f'"{level}"' in asked for level in native_library.LEVELS)
    assert "manylinux" in settings["cibuildwheel"]["build"]


@pytest.mark.parametrize(
    "file", ["pyproject.toml", ".github/workflows/wheels.yml", "Dockerfile", "docs/deploy/Dockerfile.cuda"]
)
def test_what_other_machines_use_is_built_for_all_processors(file):
    assert re.search('CHORUS_BUILD_LEVELS(=|: | = ")all', (ROOT / file).read_text())


def test_the_defaults_of_families_are_package_data():
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert FILE.name in data["chorus.core.model.families"]
