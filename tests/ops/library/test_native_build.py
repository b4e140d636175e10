"""The native sources compile without a warning, and the installed library was built from them."""

from __future__ import annotations

import os
import platform
import re
import runpy
import shutil
import subprocess
import threading
from pathlib import Path

import pytest
from setuptools import Distribution
from setuptools.command.build_ext import build_ext

from chorus.ops.library import native_library

ROOT = Path(__file__).parents[3]
LEVELS = {"x86_64": ("amx", "avx512bf16", "avx512", "avx2"), "aarch64": ("neon",)}.get(platform.machine(), ())


pytestmark = pytest.mark.skipif(
    shutil.which("g++") is None or platform.system() != "Linux" or not LEVELS,
    reason="needs g++ on a system that the native library is for",
)


BUILD = runpy.run_path(str(ROOT / "setup.py"))
HERE = [level for level in BUILD["levels_to_build"](BUILD["features"](), "here") if level in LEVELS]
AVX512 = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512dq"}
LIBRARIES = {level: BUILD["library"](level) for level in BUILD["LEVELS"]}


@pytest.mark.parametrize("level", HERE)
def test_where_there_is_a_compiler_there_is_the_library(level):
    """An installation without it goes on with torch's operators, and tests of the library skip: a broken build would
    not be seen. Where none was built it was done without a compiler (`CC=false`), which `.ci/run` rules out.
    """
    if not any(map(native_library.built, LEVELS)):
        pytest.skip("the package was built without a compiler")
    assert native_library.built(level) is not None, (
        f"pip install -e . did not build chorus.ops._native_{level}, or from other sources"
    )


def test_a_machine_builds_the_best_level_that_it_runs():
    """With all of them an installation takes minutes more."""
    build = BUILD["levels_to_build"]
    assert build({"avx2", "fma"}, "here") == ["avx2"]
    assert build(AVX512, "here") == ["avx512"]
    assert build(AVX512 | {"avx512_bf16", "avx512_vnni"}, "here") == ["avx512bf16"]
    assert build(AVX512 | BUILD["FEATURES"]["amx"], "here") == ["amx"]
    assert build({"fp", "asimd"}, "here") == ["neon"]
    assert build({"sse2"}, "here") == []
    assert build(set(), "all") == build(None, "here") == [*BUILD["LEVELS"]], "of an unknown processor all"


def test_levels_to_build_may_be_named():
    build = BUILD["levels_to_build"]
    assert build(set(), "avx2 avx512") == ["avx512", "avx2"]
    with pytest.raises(SystemExit, match="CHORUS_BUILD_LEVELS is 'avx2 sse': set it to 'here', 'all' or levels"):
        build(set(), "avx2 sse")


def test_the_levels_that_a_processor_runs_are_those_of_the_library():
    """`make levels` builds and tests all but the best."""
    runs = BUILD["runs"]
    assert runs(AVX512) == ["avx512", "avx2"]
    assert set(native_library.levels()) <= set(runs(BUILD["features"]()))


@pytest.mark.parametrize(("inplace", "left"), [(True, {"avx512", "avx2"}), (False, {"avx512bf16"})])
def test_what_an_earlier_build_left_goes(tmp_path, monkeypatch, inplace, left):
    """In the source tree what is of older sources or of a level that is no more, as tests build lesser levels beside
    the installation's; in a wheel all but what was asked for.
    """
    library, source = tmp_path / "lib" / "chorus" / "ops", tmp_path / "ops" / "native"
    folder = tmp_path / "ops" if inplace else library
    library.mkdir(parents=True)
    source.mkdir(parents=True)
    for level in BUILD["LEVELS"]:
        (source / f"decoder_{level}.cpp").touch()
        os.utime(source / f"decoder_{level}.cpp", (100, 100))
    for level, seconds in {"avx512bf16": 50, "avx512": 200, "avx2": 200, "old": 200}.items():
        (folder / f"_native_{level}.so").touch()
        os.utime(folder / f"_native_{level}.so", (seconds, seconds))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(BUILD["Libraries"].run.__globals__, "ROOT", tmp_path)
    monkeypatch.setattr(build_ext, "run", lambda _: None)
    command = BUILD["Libraries"](Distribution({"ext_modules": [BUILD["library"]("avx512bf16")]}))
    command.inplace, command.build_lib = inplace, str(tmp_path / "lib")
    command.finalize_options()
    command.run()
    assert {path.name for path in folder.glob("*.so")} == {f"_native_{level}.so" for level in left}


def test_each_library_is_announced_before_it_is_compiled(monkeypatch, capsys):
    """An installation said nothing for minutes."""
    libraries = [BUILD["library"](level) for level in ("avx512", "avx2")]
    command = BUILD["Libraries"](Distribution({"ext_modules": libraries}))
    command.finalize_options()
    announced = []
    monkeypatch.setattr(build_ext, "build_extension", lambda *_: announced.append(capsys.readouterr().err))
    for library in libraries:
        command.build_extension(library)
    assert [text.partition(":")[0] for text in announced] == [
        "building chorus.ops._native_avx512, 1 of 2",
        "building chorus.ops._native_avx2, 2 of 2",
    ]


class Compiler:
    """A compiler that notes what it is asked for, and of two calls lets none end before both have begun."""

    def __init__(self) -> None:
        self.asked, self._both = [], threading.Barrier(2, timeout=20)

    def compile(self, sources, output_dir, macros, **_):
        self.asked.append((*sources, output_dir, *(name for name, _ in macros)))
        if len(self.asked) <= 2:
            self._both.wait()
        return [f"{output_dir}/decoder.o"]


def test_units_of_a_level_are_compiled_beside_each_other(monkeypatch, capsys):
    """One compiler for a whole level took a gigabyte, and twice the time that two processors take."""
    compiler, linked = Compiler(), []
    library = BUILD["library"]("avx2")
    command = BUILD["Libraries"](Distribution({"ext_modules": [library]}))
    command.finalize_options()
    command.compiler = compiler
    monkeypatch.setitem(BUILD["Libraries"].build_extensions.__globals__, "processors", lambda: 2)
    monkeypatch.setattr(
        build_ext,
        "build_extensions",
        lambda self: linked.extend(self.compiler.compile(library.sources, output_dir="build", macros=[], debug=None)),
    )
    command.build_extensions()
    units = BUILD["units"]()
    source = "ops/native/decoder_avx2.cpp"
    assert {*compiler.asked} == {(source, f"build/{unit}", "CHORUS_UNIT", f"CHORUS_UNIT_{unit}") for unit in units}
    assert linked == [f"build/{unit}/decoder.o" for unit in units]
    assert f"{len(units)} of {len(units)}" in capsys.readouterr().err


def test_what_headers_mark_is_of_a_unit():
    """What a unit that is not built has would be missing."""
    headers = [path for path in (ROOT / "ops" / "native").rglob("*.h") if path.name != "units.h"]
    marks = {name for path in headers for name in re.findall(r"CHORUS_UNIT_(\w+)", path.read_text("utf-8"))}
    assert marks == {*BUILD["units"]()}


def test_a_unit_is_compiled_once_in_a_run_of_ci(tmp_path):
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\necho "$*" >> "$COMPILED/calls"\necho "$3" > out.o\n')
    compiler.chmod(0o755)
    paths = f"{tmp_path}:{os.environ['PATH']}"
    for unit in ("PRODUCTS", "MIXERS", "PRODUCTS"):
        (tmp_path / "out.o").unlink(missing_ok=True)
        command = [ROOT / ".ci" / "compile-once", "-c", "-DCHORUS_UNIT=1", f"-DCHORUS_UNIT_{unit}=template"]
        environment = {"PATH": paths, "COMPILED": str(tmp_path)}
        subprocess.run([*command, "decoder.cpp", "-o", "out.o"], cwd=tmp_path, env=environment, check=True)
        assert unit in (tmp_path / "out.o").read_text()
    assert len((tmp_path / "calls").read_text().splitlines()) == 2


def test_every_level_is_built_from_all_headers():
    assert BUILD["LEVELS"] == native_library.LEVELS
    for library in LIBRARIES.values():
        assert {"ops/native/decoder.h", "ops/native/gemm/gemm.h"} <= {*library.depends}
        assert library.optional, "a compiler that a level is too new for must still build the others"


@pytest.mark.slow
@pytest.mark.parametrize("level", [level for level in LIBRARIES if level != "avx512bf16"])  # all of it is in amx's
def test_no_warnings(level):
    """Only warnings of the compiler's front end: generating a level's code takes a minute or two. That each level
    assembles is checked where it runs, and of all by the job that builds wheels.
    """
    library = LIBRARIES[level]
    flags = library.extra_compile_args
    assert {"-Wall", "-Wextra"} <= set(flags) and "-w" not in flags
    assert "-ffp-contract=off" in flags, (
        "additions and multiplications are joined where the source says so, nowhere else"
    )
    includes = [f"-I{each}" for each in library.include_dirs]
    command = ["g++", *flags, *includes, "-Werror", "-fsyntax-only", *library.sources]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
