"""`chorus doctor`: installed parts, used parts, and the fix for missing ones."""

from __future__ import annotations

import io
import subprocess
import sys

import pytest
import torch

from chorus.ops.library import native_library
from chorus.server.cli import command as cli
from chorus.server.cli import doctor


@pytest.fixture
def told(monkeypatch):
    """`told()`: the doctor's output, over a buffer of a few pages."""
    monkeypatch.setattr(doctor, "BUFFER_BYTES", 1 << 20)
    monkeypatch.setattr(doctor, "SECONDS", 0.0)

    def tell():
        out = io.StringIO()
        doctor.run(out)
        return out.getvalue()

    return tell


def test_the_command_prints_a_line_for_each_part_of_the_machine(monkeypatch, capsys, told):
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    names = [line.split("  ")[0].strip() for line in lines[: lines.index("")]]
    assert names == [
        "chorus",
        "system",
        "processor",
        "threads",
        "memory",
        "CPU kernels",
        "compiler",
        "GPU",
        "FlashInfer",
        "images",
    ]
    assert "GB/s" in lines[4]


@pytest.mark.parametrize(
    ("lacking", "mended", "line"),
    [
        ("pillow is not installed: pip", False, "pillow is not installed: pip"),
        (None, False, "served"),
        (None, True, "served; torchvision is of another build than torch, so programs can't import peft: pip install"),
    ],
)
def test_what_images_lack_is_named(monkeypatch, told, lacking, mended, line):
    monkeypatch.setattr(doctor, "why_lacking", lambda: lacking)
    monkeypatch.setattr(doctor, "mend_torchvision", lambda: mended)
    assert f"\nimages       {line}" in told()


@pytest.mark.parametrize(
    ("isa", "line", "mend"),
    [
        (None, "the native decoder, avx512 (of avx512, avx2)", "a processor with bfloat16 products"),
        ("avx2", "the native decoder, avx2 (of avx512, avx2)", "CHORUS_CPU_ISA unset: this processor has avx512"),
        ("none", "torch's operators", "the native decoder: CHORUS_CPU_ISA is 'none'"),
        ("sse", "none: the environment asks for an unavailable ISA level", "another CHORUS_CPU_ISA: "),
    ],
)
def test_the_level_is_named_and_what_a_better_one_takes(monkeypatch, told, isa, line, mend):
    monkeypatch.setattr(native_library, "levels", lambda: ["avx512", "avx2"])
    monkeypatch.setattr(native_library, "built", lambda level: object())
    monkeypatch.setattr(doctor, "features", lambda: {"avx512f"})
    if isa is None:
        monkeypatch.delenv("CHORUS_CPU_ISA", raising=False)
    else:
        monkeypatch.setenv("CHORUS_CPU_ISA", isa)
    text = told()
    assert f"CPU kernels  {line}" in text
    assert f"- {mend}" in text


def test_without_a_compiler_the_mend_is_one(monkeypatch, told):
    monkeypatch.setattr(native_library, "built", lambda level: None)
    monkeypatch.setattr(doctor.platform, "system", lambda: "Linux")
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    monkeypatch.delenv("CHORUS_CPU_ISA", raising=False)
    text = told()
    assert "torch's operators" in text
    assert "- a C++ compiler (g++ or clang++), then Chorus installed again" in text


def test_a_compiler_that_is_false_is_none(monkeypatch, told):
    """How a build without one is tried."""
    monkeypatch.setenv("CXX", "false")
    monkeypatch.setenv("CC", "false")
    assert "compiler     none" in told()


@pytest.fixture
def gpu(monkeypatch):
    """A GPU, as far as torch tells of it."""
    for name, value in (
        ("is_available", True),
        ("mem_get_info", (1 << 30, 2 << 30)),
        ("get_device_capability", (9, 0)),
        ("get_device_name", "A GPU"),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)


@pytest.mark.usefixtures("gpu")
def test_a_gpu_without_triton_is_not_used_and_that_is_said(monkeypatch, told):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(doctor, "uses_gpu", lambda device: False)
    monkeypatch.setattr(doctor, "flashinfer_obstacle", lambda *_: "there is no module for it")
    text = told()
    assert "A GPU, compute capability 9.0, 1.0 GiB of 2.0 GiB free; not used: Triton is not installed" in text
    assert "pip install 'chorus-lora[cuda12]'" in text
    assert "- FlashInfer for attention: there is no module for it" in text


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("obstacle", "said"),
    [(None, ", also with a KV cache in FP8"), ("none", "; with a KV cache in FP8 our decode kernel")],
)
def test_flashinfer_with_a_kv_cache_in_float8(monkeypatch, told, obstacle, said):
    monkeypatch.setattr(doctor, "version", lambda name: "0.6.4")
    monkeypatch.setattr(doctor, "flashinfer_obstacle", lambda *_, float8_kv=False: obstacle if float8_kv else None)
    assert f"in bfloat16 are there or can be built{said}" in told()


def test_windows_is_pointed_to_its_subsystem_for_linux():
    code = "import sys; sys.platform = 'win32'; import chorus"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "ImportError: Chorus does not run on Windows itself" in found.stderr
    assert "wsl" in found.stderr
