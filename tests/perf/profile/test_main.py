"""The whole command on a CPU, where operators stand for kernels: no test looks at a speed."""

from __future__ import annotations

import json
import stat

import pytest
import torch

from chorus.perf.profile.__main__ import main
from chorus.perf.profile.loads import Load, UnknownLoad

from . import test_trace

LOADS = ["decode:2:lora", "decode:2:merged", "decode:3:ranks", "mixed:8:lora", "prefill:16", "cold:16"]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def profile(tmp_path, *argv):
    return main(["--out", str(tmp_path), "--device", "cpu", "--steps", "2", *argv])


@pytest.mark.wide
def test_every_kind_of_load_is_profiled(tmp_path, capsys):
    assert profile(tmp_path, *LOADS) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["loads"]
    assert list(found) == [
        "decode:2:lora",
        "decode:2:merged",
        "decode:3:ranks",
        "mixed:8:lora",
        "prefill:16:base",
        "cold:16:lora",
    ]
    for name, load in found.items():
        assert load["steps"] == 2, name
        assert {"base products", "attention"} <= {row["part"] for row in load["parts"]}, name
        assert load["floor_us"] > 0, name
        assert (tmp_path / f"{name.replace(':', '-')}.trace.json").is_file()
    floors = {name: {row["part"]: row["floor_us"] for row in load["parts"]} for name, load in found.items()}
    assert floors["decode:2:merged"].get("LoRA") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("decode", "'decode' is no load: give KIND:SIZE"),
        ("decode:0", "'decode:0' is no load"),
        ("idle:4", "is no load: give KIND:SIZE[:MODE] with decode, mixed, prefill, cold"),
        ("prefill:8:merged", "the mode of prefill is one of base, lora, not 'merged'"),
    ],
)
def test_an_unknown_load_is_refused(tmp_path, capsys, text, said):
    assert profile(tmp_path, text) == 2
    assert said in capsys.readouterr().err
    with pytest.raises(UnknownLoad):
        Load.parse(text)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--model-size", "huge", "decode:1"], "invalid choice: 'huge'"),
        (["--engine", "pages", "--", "decode:1"], "'pages': give NAME=VALUE with a field of EngineConfig"),
        (["--engine", "num_pages=64", "decode:1"], "'decode:1': give NAME=VALUE"),
        (["--steps", "0", "decode:1"], "0 is below 1"),
        (["--launches", "0", "decode:1"], "0 is below 1"),
    ],
)
def test_bad_arguments_are_told_with_this_command_s_usage(tmp_path, capsys, argv, said):
    with pytest.raises(SystemExit) as ended:
        profile(tmp_path, *argv)
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert said in told
    assert told.startswith("usage: python -m chorus.perf.profile")


def test_a_machine_without_a_gpu_is_told(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["--out", str(tmp_path), "decode:1"]) == 2
    assert "torch sees no CUDA device" in capsys.readouterr().err


def test_a_missing_tool_is_told_before_anything_is_measured(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert profile(tmp_path, "--nsys", "decode:1") == 2
    assert "nsys is not on the PATH" in capsys.readouterr().err
    assert profile(tmp_path, "--ncu", "decode:1") == 2
    assert "ncu is not on the PATH" in capsys.readouterr().err


@pytest.mark.wide
def test_nsight_systems_records_the_same_steps(tmp_path, capsys, monkeypatch):
    """A stand-in for the tool runs the command, then exports tables."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (tmp_path / "cuda_gpu_trace").write_text(test_trace.KERNELS)
    (tmp_path / "cuda_api_trace").write_text(test_trace.CALLS)
    (tmp_path / "nvtx_pushpop_trace").write_text(test_trace.SPANS)
    tool = folder / "nsys"
    tool.write_text(
        '#!/bin/sh\nif [ "$1" = stats ]; then cat "' + str(tmp_path) + '/${2#--report=}"; exit; fi\n'
        'while [ "${1#-}" != "$1" ] || [ "$1" = profile ]; do shift; done\n"$@"\n'
    )
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert profile(tmp_path, "--nsys", "--engine", "dependent_launch=off", "--", "decode:1") == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["loads"]["decode:1:base"]
    assert "error" not in found
    assert (found["steps"], found["host_us"]) == (1, 5.0)


def test_a_load_that_fails_costs_no_other(tmp_path, capsys, monkeypatch):
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nsys").write_text("#!/bin/sh\necho no permission >&2; exit 4\n")
    (folder / "nsys").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    assert profile(tmp_path, "--nsys", "decode:1", "decode:2") == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["loads"]
    assert {name: load["error"] for name, load in found.items()} == {
        "decode:1:base": "nsys ended with 4: no permission\n",
        "decode:2:base": "nsys ended with 4: no permission\n",
    }
