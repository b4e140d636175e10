"""Nsight Systems and Nsight Compute: their command lines, and the tables that they export.

Tests: tests/perf/profile/test_nsight.py
"""

from __future__ import annotations

import csv
import io
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..report.table import Table

#: What provides each tool.
PACKAGES = {
    "nsys": "install nsight-systems-cli from NVIDIA's repository, or the CUDA toolkit",
    "ncu": "install nsight-compute from NVIDIA's repository, or the CUDA toolkit",
}

#: Metrics of Nsight Compute, and their columns here.
METRICS = {
    "gpu__time_duration.sum": "µs",
    "dram__bytes_read.sum": "MB read",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "% of DRAM",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "% of SMs",
    "launch__registers_per_thread": "registers",
    "launch__shared_mem_per_block": "shared bytes",
}


class MissingTool(RuntimeError):
    """A tool of NVIDIA's is not on this machine."""


def need(tool: str) -> str:
    """The tool's path. Raises MissingTool, which says where it comes from."""
    if (path := shutil.which(tool)) is None:
        raise MissingTool(f"{tool} is not on the PATH: {PACKAGES[tool]}")
    return path


def systems_command(report: Path, command: Sequence[str]) -> list[str]:
    """Run a command under Nsight Systems: every kernel of a replay, with the spans of its steps, into one report."""
    flags = [
        "--trace=cuda,nvtx",
        "--sample=none",
        "--cpuctxsw=none",
        "--cuda-graph-trace=node",
        "--force-overwrite=true",
    ]
    return [need("nsys"), "profile", *flags, f"--output={report}", *command]


def systems_tables(report: Path) -> tuple[str, str, str]:
    """The kernels, the host's calls and the spans of a report, as CSV. Raises RuntimeError with what the tool said."""
    return _stats(report, "cuda_gpu_trace"), _stats(report, "cuda_api_trace"), _stats(report, "nvtx_pushpop_trace")


def _stats(report: Path, table: str) -> str:
    command = [need("nsys"), "stats", f"--report={table}", "--format=csv", "--output=-", "--force-export=true"]
    return _output([*command, str(report)])


def compute_command(report: Path, kernels: str, launches: int, command: Sequence[str]) -> list[str]:
    """Run a command under Nsight Compute. kernels: a regular expression of their names. launches: the most of them."""
    flags = ["--target-processes=all", "--graph-profiling=node", "--clock-control=none", "--force-overwrite"]
    what = [f"--kernel-name=regex:{kernels}", f"--launch-count={launches}", f"--metrics={','.join(METRICS)}"]
    return [need("ncu"), *flags, *what, f"--export={report}", *command]


def compute_table(report: Path) -> Table:
    """The metrics of a report, one row a launch."""
    return read_compute(_output([need("ncu"), f"--import={report}", "--csv", "--page=raw", "--print-units=base"]))


def read_compute(text: str) -> Table:
    """The table of what `ncu --csv --page raw` prints: a head, a row of units, and a row for each launch."""
    lines = text.splitlines()
    begins = next((index for index, line in enumerate(lines) if "Kernel Name" in line), None)
    if begins is None:
        raise RuntimeError(f"Nsight Compute's report has no kernels; it says {text[:200]!r}")
    rows = list(csv.DictReader(io.StringIO("\n".join(lines[begins:]))))
    table = Table("Nsight Compute", ["kernel", *METRICS.values()])
    for row in rows[1:] if rows and not rows[0]["Kernel Name"] else rows:
        table.add(row["Kernel Name"][:60], *(_value(row, metric) for metric in METRICS))
    return table


def _value(row: Mapping[str, Any], metric: str) -> float | None:
    """A metric in its column's unit, from base units: nanoseconds and bytes."""
    text = (row.get(metric) or "").replace(",", "")
    try:
        value = float(text)
    except ValueError:
        return None
    return value / {"gpu__time_duration.sum": 1e3, "dram__bytes_read.sum": 1e6}.get(metric, 1.0)


def _output(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    return done.stdout
