"""NEON computes the bits of AVX2: one program for both, the one of another architecture under an emulator."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from chorus.ops.library import native_library

SOURCES = Path(native_library.__file__).parents[1] / "native"
PROGRAM = Path(__file__).parent / "native_bits.cpp"
FLAGS = ["-std=c++17", "-fno-exceptions", "-pthread", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]


def output(folder: Path, compiler: list[str], simd: str, emulator: list[str]) -> list[str]:
    program = folder / simd
    command = [
        *compiler,
        *FLAGS,
        f"-I{SOURCES}",
        f"-include{SOURCES / 'simd' / simd}",
        str(PROGRAM),
        "-o",
        str(program),
    ]
    subprocess.run(command, check=True)
    return subprocess.run([*emulator, str(program)], check=True, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(
    not shutil.which("aarch64-linux-gnu-g++") or not shutil.which("qemu-aarch64"),
    reason="needs a compiler for aarch64 (g++-aarch64-linux-gnu) and its emulator (qemu-user)",
)
@pytest.mark.skipif(
    "AVX" not in torch.backends.cpu.get_cpu_capability(), reason="has nothing to compare with: needs AVX2"
)
def test_neon_gives_the_bits_of_avx2(tmp_path):
    avx2 = output(tmp_path, ["g++", "-O0", "-mavx2", "-mfma", "-mf16c"], "simd_avx2.h", [])
    neon = output(tmp_path, ["aarch64-linux-gnu-g++", "-O1", "-static"], "simd_neon.h", ["qemu-aarch64"])
    assert len(neon) == 520
    assert neon == avx2
