"""Reports of Nsight Systems and Nsight Compute as numbers: top kernels, gaps, bandwidth per SGMV launch."""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

from .commands import SGMV_KERNELS


class UnreadableReport(ValueError):
    """A profiler's output is not what was expected."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One execution of a kernel: times in ns; correlation: equal for all kernels of one graph launch.

    metrics: Nsight Compute's counters by name, in base units (ns, bytes, %).
    """

    name: str
    start: int = 0
    duration: float = 0.0
    correlation: str = ""
    metrics: Mapping[str, float] = field(default_factory=dict)

    @property
    def end(self) -> float:
        return self.start + self.duration


def trace(text: str) -> list[Kernel]:
    """`nsys stats --report cuda_gpu_trace`: kernels in the order in which they began; no copies and fills."""
    found = [
        Kernel(row["Name"], int(row["Start (ns)"]), int(row["Duration (ns)"]), row["CorrId"])
        for row in _rows(text, "Start (ns)")
        if not row["Name"].startswith("[CUDA ")
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def counters(text: str) -> list[Kernel]:
    """`ncu --csv --page raw`: a row per kernel, below one of units."""
    found = []
    for row in _rows(text, '"ID"'):
        metrics = {}
        for name, value in row.items():
            with suppress(ValueError):  # a metric is a number, maybe with separators of thousands
                if "__" in name:
                    metrics[name] = float(value.replace(",", ""))
        if row["ID"]:
            found.append(Kernel(row["Kernel Name"], duration=metrics["gpu__time_duration.sum"], metrics=metrics))
    return found


def top(kernels: Iterable[Kernel]) -> list[dict[str, Any]]:
    """Kernels by name, in descending order of their total time."""
    by_name: dict[str, list[float]] = defaultdict(list)
    for kernel in kernels:
        by_name[kernel.name].append(kernel.duration)
    every = sum(map(sum, by_name.values()))
    return [
        {"kernel": name, "share": sum(times) / every, "total_us": sum(times) / 1e3, "count": len(times),
         "median_us": median(times) / 1e3, "least_us": min(times) / 1e3}
        for name, times in sorted(by_name.items(), key=lambda item: -sum(item[1]))
    ]  # fmt: skip


def graph_gaps(kernels: Iterable[Kernel]) -> dict[str, Any]:
    """Time without a kernel between one graph launch and the next, and within graphs; None without two launches.

    A graph launch is a group of kernels of one correlation id; busy_share: of the time from the first launch's start
    to the last one's end that a graph was running.
    """
    groups: dict[str, list[Kernel]] = defaultdict(list)
    for kernel in kernels:
        groups[kernel.correlation].append(kernel)
    graphs = sorted(
        (min(k.start for k in group), max(k.end for k in group)) for group in groups.values() if len(group) > 1
    )
    found = {"graph_launches": len(graphs), "count": None, "median_us": None, "largest_us": None, "busy_share": None}
    if len(graphs) < 2:
        return found
    gaps = [max(0, after[0] - before[1]) for before, after in pairwise(graphs)]
    busy = 1 - sum(gaps) / (graphs[-1][1] - graphs[0][0])
    return found | {
        "count": len(gaps), "median_us": median(gaps) / 1e3, "largest_us": max(gaps) / 1e3, "busy_share": busy
    }  # fmt: skip


def sgmv(
    kernels: Sequence[Kernel], launches: Sequence[Mapping[str, Any]], bandwidth: float | None
) -> list[dict[str, Any]]:
    """Median time per SGMV launch of a layer and counted bytes over it; with counters, what memory moved beside them.

    launches: of one layer, in order, each with kernel, group and bytes; a step repeats them layer by layer.
    """
    found = [kernel for kernel in kernels if re.match(SGMV_KERNELS, kernel.name)]
    whole = len(found) - len(found) % len(launches)  # profilers may stop in the middle of a layer
    if not whole:
        raise UnreadableReport(f"{len(found)} SGMV kernels were seen, a layer has {len(launches)}")
    rows = []
    for index, kernel in enumerate(found[:whole]):
        wanted = launches[index % len(launches)]["kernel"]
        if not kernel.name.startswith(wanted):
            raise UnreadableReport(
                f"SGMV kernel {index} is {kernel.name}, a layer's launch {index % len(launches)} is {wanted}: the "
                "workload's description belongs to another run"
            )
    for at, launch in enumerate(launches):
        own = found[at : whole : len(launches)]
        seconds, counted = median(kernel.duration for kernel in own) / 1e9, launch["bytes"]
        share = None if bandwidth is None else counted / seconds / bandwidth
        row = {"kernel": launch["kernel"], "group": launch["group"], "count": len(own), "us": seconds * 1e6,
               "bytes": counted, "bytes_per_s": counted / seconds, "share": share}  # fmt: skip
        if own[0].metrics:
            moved = median(k.metrics["dram__bytes_read.sum"] + k.metrics["dram__bytes_write.sum"] for k in own)
            peak = "dram__throughput.avg.pct_of_peak_sustained_elapsed"
            row |= {"dram_bytes": moved, "dram_over_counted": moved / counted, "dram_bytes_per_s": moved / seconds,
                    "peak_percent": median(kernel.metrics[peak] for kernel in own),
                    "registers": median(kernel.metrics["launch__registers_per_thread"] for kernel in own)}  # fmt: skip
        rows.append(row)
    return rows


def _rows(text: str, title: str) -> list[dict[str, str]]:
    """The table that begins with the line that `title` begins; what a tool says before and after it is left out."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.lstrip("\ufeff").startswith(title)), None)
    if begin is None:
        raise UnreadableReport(f"no table begins with {title}; the output begins with {text[:200]!r}")
    table = io.StringIO("\n".join(line for line in lines[begin:] if line and not line.startswith("==")))
    return [row for row in csv.DictReader(table) if None not in row.values()]
