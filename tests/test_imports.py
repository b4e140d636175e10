"""The cost of an import: optional dependencies are imported lazily, and the root package imports nothing.

`.importlinter` (`make imports`) says which package may import which, and gives optional dependencies their homes.
Ruff's TID251 holds that source imports its own packages relatively.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("core", "graphs", "memory", "ops", "perf", "server")

#: A module that needs an optional dependency is named after it (`sgmv_triton`), and is imported lazily itself.
OPTIONAL = ("triton", "flashinfer", "cupy", "ray", "highspy", "fsspec")

POLICY = (
    "core.engine",
    "core.scheduling.scheduler",
    "core.requests.request",
    "core.requests.types",
    "memory.adapters.store",
    "memory.pages.prefix",
)


def modules() -> list[str]:
    """Names of all source modules below `chorus`."""
    files = [path.relative_to(ROOT).with_suffix("") for name in PACKAGES for path in (ROOT / name).rglob("*.py")]
    return [".".join(path.parts).removesuffix(".__init__") for path in sorted(files)]


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def importing(names: list[str] | tuple[str, ...], without: tuple[str, ...]) -> str:
    """A program that imports modules where others can't be imported."""
    return (
        f"import importlib, sys\nsys.modules.update(dict.fromkeys({without!r}))\n"
        f"for name in {list(names)!r}: importlib.import_module('chorus.' + name)\n"
    )


@pytest.mark.wide
def test_every_module_can_be_imported_without_optional_dependencies():
    needs = tuple(f"_{name}" for name in OPTIONAL)
    plain = [name for name in modules() if not name.endswith((*needs, "__main__"))]
    assert len(plain) > 300
    result = run(importing(plain, OPTIONAL))
    assert result.returncode == 0, result.stderr[-2000:]


@pytest.mark.wide
def test_policy_code_needs_no_torch():
    """The simulator runs the engine itself, without tensors."""
    result = run(importing(POLICY, ("torch",)))
    assert result.returncode == 0, result.stderr[-2000:]


def test_the_root_package_imports_nothing_else():
    result = run("import sys, chorus; print(*[name for name in sys.modules if name.startswith('chorus.')])")
    assert result.stdout.split() == []
