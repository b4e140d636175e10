"""Packages and native libraries of the build; everything else stands in pyproject.toml."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Set
from pathlib import Path

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

LEVELS = ("amx", "avx512bf16", "avx512", "avx2", "neon")
"""ISA levels, as in `ops/library/native_library.py`, which loads the best one that the processor has."""

SETTING = "CHORUS_BUILD_LEVELS"
"""Environment variable: `here`, the default, builds what this machine runs, `all` what any may, as for a wheel or an
image that other machines will use.
"""

AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
AVX512_BF16 = AVX512 | {"avx512_bf16", "avx512_vnni"}
FEATURES = {"amx": AVX512_BF16 | {"amx_tile", "amx_bf16"}, "avx512bf16": AVX512_BF16, "avx512": AVX512}
"""Features of a processor, as Linux names them, without which a level is not used. Others are always built: a machine
that is moved to an older processor has them still.
"""

CPU_INFO = Path("/proc/cpuinfo")

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


LEFT_OUT = ["tests*", "examples*", "docs*", "build*", "perf.*"]
KEPT = ["perf.plan*", "perf.simulate*", "perf.workload*"]
"""`chorus plan` and `chorus simulate`. Of `perf`, benchmarks and what measures them stay in the repository."""

MODULES_LEFT_OUT = {("chorus", "setup"), ("chorus.perf", "inline_reads")}


class Modules(build_py):
    """Leaves out this file, and what only benchmarks and tests use, of the packages that they stand in."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        found = super().find_package_modules(package, package_dir)
        return [module for module in found if module[:2] not in MODULES_LEFT_OUT]


class Libraries(build_ext):
    """Removes what an earlier build of other levels left in the source tree: it is of older sources."""

    def build_extension(self, ext: Extension) -> None:
        """Say which library comes, as each takes minutes: `pip install -v` shows it."""
        number = 1 + self.extensions.index(ext)
        print(f"building {ext.name}, {number} of {len(self.extensions)}: a minute or two", file=sys.stderr, flush=True)
        super().build_extension(ext)

    def run(self) -> None:
        super().run()
        kept = {Path(self.get_ext_fullpath(each.name)).name for each in self.extensions}
        for path in (ROOT / "ops").glob("_native_*.so"):
            if self.inplace and path.name not in kept:
                path.unlink()


def packages() -> list[str]:
    """The repository root is the package `chorus`."""
    found = find_packages(str(ROOT), exclude=LEFT_OUT)
    found += find_packages(str(ROOT), include=KEPT, exclude=["perf.simulate.agreement"])
    return ["chorus", *(f"chorus.{name}" for name in found)]


def features() -> Set[str] | None:
    """Features of this machine's processor; None if they are not known."""
    if platform.machine() != "x86_64" or not CPU_INFO.exists():
        return None
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    return next(({*line.partition(":")[2].split()} for line in lines if line.startswith("flags")), None)


def levels_to_build(found: Set[str] | None, setting: str) -> list[str]:
    """found: the processor's features; None builds all levels. Compiling one takes a processor a minute or two."""
    if setting not in ("here", "all"):
        raise SystemExit(f"{SETTING} is {setting!r}: set it to 'here' or 'all', or leave it out")
    if setting == "all" or found is None:
        return [*LEVELS]
    return [level for level in LEVELS if FEATURES.get(level, set()) <= found]


def library(level: str) -> Extension:
    """One library per ISA level. A library is empty on another architecture, and `optional` lets the others be built
    where the compiler is too old for one. Without a compiler PyTorch's operators serve.
    """
    return Extension(
        f"chorus.ops._native_{level}",
        sources=[f"ops/native/decoder_{level}.cpp"],
        depends=sorted(str(path.relative_to(ROOT)) for path in (ROOT / "ops/native").rglob("*.h")),
        include_dirs=["ops/native"],
        extra_compile_args=FLAGS,
        extra_link_args=["-Wl,-Bsymbolic"],
        language="c++",
        optional=True,
    )


if __name__ == "__main__":
    built = levels_to_build(features(), os.environ.get(SETTING, "here"))
    commands = {"build_ext": Libraries, "build_py": Modules}
    setup(cmdclass=commands, packages=packages(), ext_modules=[library(level) for level in built])
