"""The profilers' command lines, and what happens with and without them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from chorus.perf.profile import __main__ as profile
from chorus.perf.profile.commands import ToolMissing, find_tool, ncu, nsys

FILES = Path(__file__).parent / "profiles"


def test_nsys_command_lines(tmp_path):
    profile, stats = nsys("/opt/nsys", tmp_path / "nsys", ["python", "-m", "x"])
    assert profile == [
        "/opt/nsys", "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
        "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--cuda-graph-trace=node",
        "--force-overwrite=true", f"--output={tmp_path}/nsys", "python", "-m", "x",
    ]  # fmt: skip
    assert stats == [
        "/opt/nsys", "stats", "--report", "cuda_gpu_trace", "--format", "csv",
        "--output", f"{tmp_path}/nsys", "--force-export=true", "--force-overwrite=true", f"{tmp_path}/nsys.nsys-rep",
    ]  # fmt: skip


def test_ncu_command_line(tmp_path):
    (command,) = ncu("/opt/ncu", tmp_path / "ncu", ["python", "-m", "x"], "^shrink", 8)
    assert command == [
        "/opt/ncu", "--profile-from-start", "off", "--nvtx", "--nvtx-include", "chorus@workload/",
        "--clock-control", "none", "--graph-profiling", "node", "--target-processes", "all",
        "--kernel-name", "regex:^shrink", "--launch-count", "8", "--metrics",
        "gpu__time_duration.sum,dram__bytes_read.sum,dram__bytes_write.sum,"
        "dram__throughput.avg.pct_of_peak_sustained_elapsed,lts__t_sector_hit_rate.pct,"
        "sm__warps_active.avg.pct_of_peak_sustained_active,launch__registers_per_thread",
        "--page", "raw", "--print-units", "base", "--csv", "--log-file", f"{tmp_path}/ncu.csv", "python", "-m", "x",
    ]  # fmt: skip


def test_the_range_is_in_the_domain_of_the_engines_spans():
    from chorus.core.model.nvtx_spans import DOMAIN
    from chorus.perf.profile.commands import NVTX_RANGE

    assert NVTX_RANGE.partition("@")[0] == DOMAIN


@pytest.mark.parametrize("tool", ["nsys", "ncu"])
def test_a_missing_tool_is_named_with_what_would_run(tool, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert profile.main([tool, "--out", str(tmp_path / "out"), "--rows", "8"]) == profile.TOOL_MISSING
    said = capsys.readouterr()
    assert f"{tool} is not on the PATH; install Nsight" in said.err
    *commands, last = said.out.splitlines()
    assert commands[0].startswith(f"{tool} ")
    assert ("--kind sgmv" in commands[0]) == (tool == "ncu")
    assert "--rows 8" in commands[0]
    assert json.loads(last) == {"ok": False, "missing": tool}


def test_a_tool_that_is_no_program(tmp_path):
    with pytest.raises(ToolMissing, match="nowhere is not a program"):
        find_tool("ncu", tmp_path / "nowhere")


def test_a_dry_run_prints_commands_only(tmp_path, capsys):
    assert profile.main(["nsys", "--out", str(tmp_path), "--tool", sys.executable, "--dry-run"]) == 0
    assert len(capsys.readouterr().err.splitlines()) == 2
    assert not list(tmp_path.iterdir())


def tool(path: Path, lines: list[str]) -> Path:
    """A stand-in for a profiler."""
    path.write_text("\n".join([f"#!{sys.executable}", "import json, os, shutil, sys", *lines]) + "\n")
    path.chmod(path.stat().st_mode | stat.S_IEXEC)
    return path


DESCRIBE = [
    "args = sys.argv",
    "launch = lambda kernel, group: {'kernel': kernel + '_decode', 'group': group, 'bytes': 4000000}",
    "if '--describe' in args:",
    "    assert os.environ['CHORUS_NVTX'] == '1'",
    "    launches = [launch(k, g) for g in ('qkv', 'o') for k in ('shrink', 'expand')]",
    "    known = {'launches': launches, 'rank': 16, 'rows': 4, 'popularity': 'distinct'}",
    "    open(args[args.index('--describe') + 1], 'w').write(json.dumps(known))",
]


def limits(tmp_path: Path) -> Path:
    path = tmp_path / "limits.json"
    path.write_text(json.dumps({"values": {"copy": {"bytes_per_s": 4e12}, "read": {"bytes_per_s": 3e12}}}))
    return path


def test_nsys_to_tables(tmp_path, capsys):
    name = "_cuda_gpu_trace.csv"
    copy = f"    shutil.copyfile({str(FILES / f'nsys{name}')!r}, args[args.index('--output') + 1] + '{name}')"
    nsys = tool(tmp_path / "nsys", [*DESCRIBE, "if args[1] == 'stats':", copy])
    out = tmp_path / "out"
    assert profile.main(["nsys", "--out", str(out), "--tool", str(nsys), "--limits", str(limits(tmp_path))]) == 0
    shown = capsys.readouterr().out
    assert all(title in shown for title in ("top kernels", "between graph launches", "SGMV launches, rank 16, 4 rows"))
    found = json.loads((out / "nsys.json").read_text("utf-8"))
    assert found["gaps"]["graph_launches"] == 2
    assert found["bandwidth_bytes_per_s"] == 4e12
    assert found["sgmv"][0]["share"] == pytest.approx(1.0)


def test_ncu_to_tables(tmp_path, capsys):
    copy = f"shutil.copyfile({str(FILES / 'ncu_raw.csv')!r}, args[args.index('--log-file') + 1])"
    ncu = tool(tmp_path / "ncu", [*DESCRIBE, copy])
    out = tmp_path / "out"
    assert profile.main(["ncu", "--out", str(out), "--tool", str(ncu), "--limits", str(limits(tmp_path))]) == 0
    assert "DRAM/counted" in capsys.readouterr().out
    found = json.loads((out / "ncu.json").read_text("utf-8"))
    assert found["profiled"] == 4
    assert found["sgmv"][0]["dram_bytes"] == 12_500_000


def test_a_profiler_that_fails_is_told(tmp_path, capsys):
    nsys = tool(tmp_path / "nsys", ["sys.exit(7)"])
    assert profile.main(["nsys", "--out", str(tmp_path / "out"), "--tool", str(nsys)]) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["exit"] == 7


def test_the_workload_describes_what_ran(tmp_path):
    description = tmp_path / "w.json"
    command = [
        sys.executable, "-m", "chorus.perf.profile", "workload", "--device", "cpu", "--model-size", "tiny",
        "--rows", "4", "--rank", "8", "--popularity", "uniform", "--steps", "2", "--prompt-tokens", "5",
        "--describe", str(description),
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(description.read_text("utf-8"))
    assert json.loads(done.stdout.splitlines()[-1]) == found
    assert [(launch["kernel"], launch["group"]) for launch in found["launches"][:3]] == [
        ("shrink_decode", "qkv"), ("expand_decode", "qkv"), ("shrink_decode", "o")
    ]  # fmt: skip
    assert len(found["launches"]) == 8
    # two adapters: A of q, k and v for each; x once; h of every row, split and module
    itemsize, hidden, splits = 4, 128, 1
    assert (
        found["launches"][0]["bytes"] == 2 * 3 * 8 * hidden * itemsize + 4 * hidden * itemsize + splits * 4 * 3 * 8 * 4
    )
    assert found["seconds_per_step"] > 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.json"], "it leaves nothing behind"
