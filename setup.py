"""Packages and native libraries of the build; everything else stands in pyproject.toml."""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
from collections.abc import Set
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py
from setuptools.modified import newer_group

LEVELS = ("amx", "avx512bf16", "avx512", "avx2", "neon")
"""ISA levels, as in `ops/library/native_library.py`, which loads the best one that the processor has."""

SETTING = "CHORUS_BUILD_LEVELS"
"""Environment variable: `here`, the default, builds the best level that this machine runs, `all` what any may, as for a
wheel or an image that other machines will use. Names of levels build those: the tests' lesser ones.
"""

AVX512 = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
AVX512_BF16 = AVX512 | {"avx512_bf16", "avx512_vnni"}
FEATURES = {
    "amx": AVX512_BF16 | {"amx_tile", "amx_bf16"},
    "avx512bf16": AVX512_BF16,
    "avx512": AVX512,
    "avx2": {"avx2", "fma"},
    "neon": {"asimd"},
}
"""Features of a processor, as Linux names them, without which a level is not used."""

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
    """Removes libraries that an earlier build left: from the source tree those of older sources, from what becomes a
    wheel those of other levels.
    """

    def build_extensions(self) -> None:
        """Compile the units of a level instead of the whole, as many at a time as there are processors."""
        compile_whole = self.compiler.compile
        with ThreadPoolExecutor(processors()) as pool:

            def compile_unit(unit: str, sources: list[str], output_dir: str, **options: Any) -> list[str]:
                options["macros"] = [*options["macros"], ("CHORUS_UNIT", "1"), (f"CHORUS_UNIT_{unit}", "template")]
                return compile_whole(sources, output_dir=f"{output_dir}/{unit}", **options)

            def compile_units(sources: list[str], **options: Any) -> list[str]:
                compiled = {pool.submit(compile_unit, unit, sources, **options): unit for unit in units()}
                for number, each in enumerate(as_completed(compiled), 1):
                    each.result()
                    tell(f"{Path(sources[0]).stem}: {compiled[each]}, {number} of {len(compiled)}")
                return [name for each in compiled for name in each.result()]

            self.compiler.compile = compile_units
            super().build_extensions()

    def build_extension(self, ext: Extension) -> None:
        """Say which library comes, as each takes a minute of two processors: `pip install -v` shows it."""
        tell(f"building {ext.name}, {1 + self.extensions.index(ext)} of {len(self.extensions)}: a minute or less")
        super().build_extension(ext)

    def run(self) -> None:
        super().run()
        built = {each.name.rpartition("_")[2] for each in self.extensions}
        for path in (ROOT / "ops" if self.inplace else Path(self.build_lib) / "chorus/ops").glob("_native_*.so"):
            level = path.name.removeprefix("_native_").partition(".")[0]
            if newer_group(sources(level), str(path), "newer") if self.inplace else level not in built:
                path.unlink()


def tell(text: str) -> None:
    """Say how far the build is."""
    print(text, file=sys.stderr, flush=True)


def processors() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def units() -> list[str]:
    """Units of a level, which are compiled each by itself."""
    return re.findall(r"^#ifndef CHORUS_UNIT_(\w+)$", (ROOT / "ops/native/units.h").read_text("utf-8"), re.MULTILINE)


def packages() -> list[str]:
    """The repository root is the package `chorus`."""
    found = find_packages(str(ROOT), exclude=LEFT_OUT)
    found += find_packages(str(ROOT), include=KEPT)
    return ["chorus", *(f"chorus.{name}" for name in found)]


def features() -> Set[str] | None:
    """Features of this machine's processor; None if they are not known."""
    if not CPU_INFO.exists():
        return None
    lines = CPU_INFO.read_text(encoding="utf-8").splitlines()
    found = next(({*line.partition(":")[2].split()} for line in lines if line.startswith(("flags", "Features"))), None)
    return found and (found if _permits_tiles() else found - {"amx_tile"})


def _permits_tiles() -> bool:
    """Whether the system saves tile registers for a process that asks for it, as `decoder_amx.cpp` does."""
    return ctypes.CDLL(None).syscall(158, 0x1023, 18) == 0 if platform.machine() == "x86_64" else False


def runs(found: Set[str] | None) -> list[str]:
    """Levels that a processor runs, best first. found: its features; None is any processor's."""
    return [level for level in LEVELS if found is None or found >= FEATURES[level]]


def levels_to_build(found: Set[str] | None, setting: str) -> list[str]:
    """found: the processor's features; None builds all levels. Compiling one takes two processors a minute."""
    if setting == "here":
        return runs(found) if found is None else runs(found)[:1]
    named = setting.split()
    if setting != "all" and not {*named} <= {*LEVELS}:
        raise SystemExit(
            f"{SETTING} is {setting!r}: set it to 'here', 'all' or levels, or leave it out: {', '.join(LEVELS)}"
        )
    return [level for level in LEVELS if setting == "all" or level in named]


def sources(level: str) -> list[str]:
    """Files of which a level's library is built."""
    headers = (str(path.relative_to(ROOT)) for path in (ROOT / "ops/native").rglob("*.h"))
    return [f"ops/native/decoder_{level}.cpp", *sorted(headers)]


def library(level: str) -> Extension:
    """One library per ISA level. A library is empty on another architecture, and `optional` lets the others be built
    where the compiler is too old for one. Without a compiler PyTorch's operators serve.
    """
    source, *headers = sources(level)
    return Extension(
        f"chorus.ops._native_{level}",
        sources=[source],
        depends=headers,
        include_dirs=["ops/native"],
        extra_compile_args=FLAGS,
        extra_link_args=["-Wl,-Bsymbolic"],
        language="c++",
        optional=True,
    )


if __name__ == "__main__":
    built = levels_to_build(features(), os.environ.get(SETTING) or "here")
    commands = {"build_ext": Libraries, "build_py": Modules}
    setup(cmdclass=commands, packages=packages(), ext_modules=[library(level) for level in built])
