"""Command lines of Nsight Systems and Nsight Compute around a workload of this project."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

#: The range around the profiled steps, in the domain of `core.model.nvtx_spans`.
NVTX_RANGE = "chorus@workload/"

SGMV_KERNELS = r"^(shrink|expand)_(decode|prefill)"

#: Time, memory traffic and its share of the peak, and what a kernel takes of a multiprocessor.
NCU_METRICS = (
    "gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed", "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active", "launch__registers_per_thread",
)  # fmt: skip


class ToolMissing(RuntimeError):
    """A profiler is not installed here; the text says what to do."""


def nsys(tool: str, base: Path, workload: Sequence[str]) -> list[list[str]]:
    """Trace kernels, one by one inside graphs, too, between cudaProfilerStart and cudaProfilerStop; then write the
    trace to `base` + `_cuda_gpu_trace.csv`.
    """
    return [
        [tool, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--capture-range=cudaProfilerApi",
         "--capture-range-end=stop", "--cuda-graph-trace=node", "--force-overwrite=true", f"--output={base}",
         *workload],
        [tool, "stats", "--report", "cuda_gpu_trace", "--format", "csv", "--output", str(base), "--force-export=true",
         "--force-overwrite=true", f"{base}.nsys-rep"],
    ]  # fmt: skip


def ncu(tool: str, base: Path, workload: Sequence[str], kernels: str, launches: int) -> list[list[str]]:
    """Write counters of kernels in the workload's range to `base` + `.csv`; clocks are left as they are.

    kernels: a regular expression of names. launches: most that are profiled.
    """
    return [
        [tool, "--profile-from-start", "off", "--nvtx", "--nvtx-include", NVTX_RANGE, "--clock-control", "none",
         "--graph-profiling", "node", "--target-processes", "all", "--kernel-name", f"regex:{kernels}",
         "--launch-count", str(launches), "--metrics", ",".join(NCU_METRICS), "--page", "raw", "--print-units", "base",
         "--csv", "--log-file", f"{base}.csv", *workload],
    ]  # fmt: skip


def find_tool(name: str, given: Path | None) -> str:
    """Path of `nsys` or `ncu`. Raises ToolMissing, which says how to get it."""
    found = shutil.which(str(given) if given else name)
    if found is None:
        what = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}[name]
        where = f"{given} is not a program" if given else f"{name} is not on the PATH"
        raise ToolMissing(f"{where}; install {what}, or name it with --tool PATH")
    return found
