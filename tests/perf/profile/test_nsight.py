"""The command lines of NVIDIA's tools, with stand-ins for them, and what they export."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from chorus.perf.profile import nsight


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Stand-ins that print a file if there is one, and their arguments."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for tool in nsight.PACKAGES:
        path = folder / tool
        path.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\ncat {tmp_path}/{tool}.csv 2>/dev/null || exit 3\n')
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return tmp_path


def test_a_missing_tool_says_where_it_comes_from(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(nsight.MissingTool, match="nsys is not on the PATH: install nsight-systems-cli from"):
        nsight.systems_command(Path("decode.nsys-rep"), ["true"])
    with pytest.raises(nsight.MissingTool, match="ncu is not on the PATH: install nsight-compute"):
        nsight.compute_command(Path("decode.ncu-rep"), kernels="x", launches=1, command=["true"])


def test_kernels_of_replays_are_recorded_one_by_one(tools):
    command = nsight.systems_command(Path("out/decode.nsys-rep"), ["python", "-m", "x"])
    assert command[1:] == [
        "profile",
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
        "--force-overwrite=true",
        "--output=out/decode.nsys-rep",
        "python",
        "-m",
        "x",
    ]
    command = nsight.compute_command(Path("d.ncu-rep"), kernels="^shrink_", launches=9, command=["python"])
    assert {"--graph-profiling=node", "--kernel-name=regex:^shrink_", "--launch-count=9", "--export=d.ncu-rep"} <= {
        *command
    }
    assert command[-1] == "python"


def test_all_tables_are_of_one_report(tools):
    (tools / "nsys.csv").write_text("Start (ns)\n1\n")
    assert nsight.systems_tables(Path("d.nsys-rep")) == ("Start (ns)\n1\n",) * 3
    calls = (tools / "calls").read_text().splitlines()
    asked = [call.split()[1].removeprefix("--report=") for call in calls]
    assert asked == ["cuda_gpu_trace", "cuda_api_trace", "nvtx_pushpop_trace"]
    assert all(call.endswith("d.nsys-rep") for call in calls)


COMPUTE = """\
==PROF== Connected to process 12
"ID","Process ID","Kernel Name","gpu__time_duration.sum","dram__bytes_read.sum","launch__registers_per_thread"
"","","","ns","byte","register/thread"
"0","12","shrink_decode","6,200","1,048,576","40"
"1","12","multiply_rows","41000","67108864","96"
"""


def test_metrics_of_each_launch(tools):
    (tools / "ncu.csv").write_text(COMPUTE)
    table = nsight.compute_table(Path("d.ncu-rep"))
    assert table.columns[:3] == ["kernel", "µs", "MB read"]
    assert table.rows == [
        ("shrink_decode", 6.2, 1.048576, None, None, 40.0, None),
        ("multiply_rows", 41.0, 67.108864, None, None, 96.0, None),
    ]


def test_a_tool_that_fails_says_why(tools):
    with pytest.raises(RuntimeError, match="ncu ended with 3"):
        nsight.compute_table(Path("d.ncu-rep"))
    with pytest.raises(RuntimeError, match=r"report has no kernels; it says '==WARNING== No kernels"):
        nsight.read_compute("==WARNING== No kernels were profiled.\n")
