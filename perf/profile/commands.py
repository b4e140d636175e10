"""Command lines of Nsight Systems and Nsight Compute around a workload of this project."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: The range around the profiled steps, in the domain of `core.ranges`.
NVTX_RANGE = "chorus@workload/"

#: Reports of `nsys stats` that are read.
NSYS_REPORTS = ("cuda_gpu_kern_sum", "cuda_gpu_trace")

#: Time, memory traffic and its share of the peak, and what a kernel takes of a multiprocessor.
NCU_METRICS = (
    "gpu__time_duration.sum",
    "dram__bytes_read.sum",
    "dram__bytes_write.sum",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "lts__t_sector_hit_rate.pct",
    "sm__warps_active.avg.pct_of_peak_sustained_active",
    "launch__registers_per_thread",
)

SGMV_KERNELS = r"^(shrink|expand)_(decode|prefill)"


class ToolMissing(RuntimeError):
    """A profiler is not installed here; the text says what to do."""


@dataclass(frozen=True)
class Nsys:
    """Nsight Systems. tool: its path. base: result files begin with it."""

    tool: str
    base: Path

    @property
    def report(self) -> Path:
        return self.base.with_name(f"{self.base.name}.nsys-rep")

    def profile(self, workload: Sequence[str]) -> list[str]:
        """Trace kernels, also those in graphs one by one, between cudaProfilerStart and cudaProfilerStop."""
        return [
            self.tool, "profile", "--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none",
            "--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--cuda-graph-trace=node",
            "--force-overwrite=true", f"--output={self.base}", *workload,
        ]  # fmt: skip

    def stats(self) -> list[str]:
        reports = [part for name in NSYS_REPORTS for part in ("--report", name)]
        return [
            self.tool, "stats", *reports, "--format", "csv", "--output", str(self.base), "--force-export=true",
            "--force-overwrite=true", str(self.report),
        ]  # fmt: skip

    def csv(self, report: str) -> Path:
        """Path to which `stats` writes a report."""
        return self.base.with_name(f"{self.base.name}_{report}.csv")


@dataclass(frozen=True)
class Ncu:
    """Nsight Compute. kernels: a regular expression of names; launches: most that are profiled."""

    tool: str
    base: Path
    kernels: str = SGMV_KERNELS
    launches: int = 64

    @property
    def csv(self) -> Path:
        return self.base.with_name(f"{self.base.name}.csv")

    def profile(self, workload: Sequence[str]) -> list[str]:
        """Counters of kernels in the workload's range, those in graphs one by one; clocks are left as they are."""
        return [
            self.tool, "--profile-from-start", "off", "--nvtx", "--nvtx-include", NVTX_RANGE,
            "--clock-control", "none", "--graph-profiling", "node", "--target-processes", "all",
            "--kernel-name", f"regex:{self.kernels}", "--launch-count", str(self.launches),
            "--metrics", ",".join(NCU_METRICS), "--page", "raw", "--print-units", "base", "--csv",
            "--log-file", str(self.csv), *workload,
        ]  # fmt: skip


def find_tool(name: str, given: Path | None) -> str:
    """Path of `nsys` or `ncu`. Raises ToolMissing, which says how to get it."""
    found = shutil.which(str(given) if given else name)
    if found is None:
        what = {"nsys": "Nsight Systems", "ncu": "Nsight Compute"}[name]
        where = f"{given} is not a program" if given else f"{name} is not on the PATH"
        raise ToolMissing(f"{where}; install {what}, or name it with --tool PATH")
    return found
