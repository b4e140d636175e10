"""The published files: the check of wheels, and the levels that it asks for."""

from __future__ import annotations

import ast
import re
import runpy
import subprocess
import sys
import tomllib
import zipfile
from importlib.util import resolve_name
from pathlib import Path

import pytest
from setuptools import Distribution

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
        (X86, ["chorus/perf/bench/timer.py"], "x86_64", "ships chorus/perf/bench/timer.py"),
        (X86, ["chorus/perf/plan/plan.py"], "x86_64", ""),
        ((), [], "any", "is for none of"),
    ],
)
def test_a_wheel_holds_every_level_of_its_architecture_and_no_benchmarks(tmp_path, levels, more, architecture, said):
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


@pytest.fixture(scope="module")
def shipped():
    """The modules of a wheel, by name, and their files."""
    build = runpy.run_path(str(ROOT / "setup.py"))
    distribution = Distribution({"packages": build["packages"](), "package_dir": {"chorus": str(ROOT)}})
    distribution.script_name = "setup.py"
    command = build["Modules"](distribution)
    command.finalize_options()
    modules = command.find_all_modules()
    found = {f"{package}.{name}".removesuffix(".__init__"): Path(path) for package, name, path in modules}
    assert found["chorus"] == ROOT / "__init__.py"
    return found


def test_a_wheel_holds_the_planner_and_the_simulator_and_of_perf_nothing_else(shipped):
    below = [name.split(".")[1:] for name in shipped if name != "chorus"]
    assert {names[0] for names in below} == {"core", "graphs", "memory", "ops", "perf", "server"}
    assert {names[1] for names in below if names[0] == "perf" and names[1:]} == {"plan", "simulate", "workload"}


def test_a_wheel_imports_only_what_it_holds(shipped):
    """Also what it imports late, or with optional dependencies."""
    for name, path in shipped.items():
        assert not {each for each in relative_imports(name, path) if each not in shipped}, name


def relative_imports(name, path):
    """The modules that a module imports relatively, by their full names."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level:
            source = resolve_name("." * node.level + (node.module or ""), package)
            yield source
            modules = [ROOT.joinpath(*source.split(".")[1:], each.name) for each in node.names]
            yield from (f"{source}.{it.name}" for it in modules if it.is_dir() or it.with_suffix(".py").exists())
