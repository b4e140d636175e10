"""Packages and native libraries of the build; everything else stands in pyproject.toml."""

from __future__ import annotations

from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_py import build_py

LEVELS = ("amx", "avx512bf16", "avx512", "avx2", "neon")
"""ISA levels, as in `ops/native_library.py`, which loads the best one that the processor has."""

FLAGS = [
    "-O3",
    "-g0",
    "-falign-loops=32",
    "-std=c++17",
    "-fno-exceptions",
    "-fno-gnu-unique",
    "-fvisibility=hidden",
    "-pthread",
    "-ffp-contract=off",
    "-Wall",
    "-Wextra",
]

ROOT = Path(__file__).resolve().parent


class Modules(build_py):
    """Leaves this file out of the package that it stands in."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if module[:2] != ("chorus", "setup")]


def packages() -> list[str]:
    """The repository root is the package `chorus`."""
    found = find_packages(str(ROOT), exclude=["tests*", "examples*", "docs*", "build*"])
    return ["chorus", *(f"chorus.{name}" for name in found)]


def library(level: str) -> Extension:
    """One library per ISA level. A library is empty on another architecture, and `optional` lets the others be built
    where the compiler is too old for one. Without a compiler PyTorch's operators serve.
    """
    return Extension(
        f"chorus.ops._native_{level}",
        sources=[f"ops/native/decoder_{level}.cpp"],
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "ops/native").glob("*.h")),
        extra_compile_args=FLAGS,
        extra_link_args=["-Wl,-Bsymbolic"],
        language="c++",
        optional=True,
    )


if __name__ == "__main__":
    setup(cmdclass={"build_py": Modules}, packages=packages(), ext_modules=[library(level) for level in LEVELS])
