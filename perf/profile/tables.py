"""Reports of Nsight Systems and Nsight Compute as numbers: top kernels, gaps, bandwidth per SGMV launch."""

from __future__ import annotations

import csv
import io
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from .commands import SGMV_KERNELS

_GAP_TITLES = ("count", "median_us", "largest_us", "busy_share")


class UnreadableReport(ValueError):
    """A profiler's output is not what was expected."""


@dataclass(frozen=True, slots=True)
class Kernel:
    """One execution of a kernel: times in ns; correlation: equal for all kernels of one graph launch."""

    name: str
    start: int
    duration: int
    correlation: str
    stream: str

    @property
    def end(self) -> int:
        return self.start + self.duration


@dataclass(frozen=True, slots=True)
class Counters:
    """One profiled execution of a kernel; metrics by name, in base units (ns, bytes, %)."""

    name: str
    metrics: Mapping[str, float]


def kernel_sums(text: str) -> list[dict[str, Any]]:
    """`cuda_gpu_kern_sum`: kernels with the most time first."""
    rows = _rows(text, "Time (%)")
    return [
        {
            "kernel": row["Name"],
            "share": float(row["Time (%)"]) / 100,
            "total_us": float(row["Total Time (ns)"]) / 1e3,
            "count": int(row["Instances"]),
            "median_us": float(row["Med (ns)"]) / 1e3,
            "least_us": float(row["Min (ns)"]) / 1e3,
        }
        for row in rows
    ]


def kernel_trace(text: str) -> list[Kernel]:
    """`cuda_gpu_trace`: kernels in the order in which they began; copies and fills are left out."""
    rows = _rows(text, "Start (ns)")
    found = [
        Kernel(row["Name"], int(row["Start (ns)"]), int(row["Duration (ns)"]), row["CorrId"], row["Strm"])
        for row in rows
        if not row["Name"].startswith("[CUDA ")
    ]
    return sorted(found, key=lambda kernel: kernel.start)


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
    if len(graphs) < 2:
        return {"graph_launches": len(graphs), **dict.fromkeys(_GAP_TITLES)}
    gaps = [max(0, after[0] - before[1]) for before, after in pairwise(graphs)]
    span = graphs[-1][1] - graphs[0][0]
    values = (len(gaps), median(gaps) / 1e3, max(gaps) / 1e3, 1 - sum(gaps) / span)
    return {"graph_launches": len(graphs), **dict(zip(_GAP_TITLES, values, strict=True))}


def sgmv_from_trace(
    kernels: Sequence[Kernel], launches: Sequence[Mapping[str, Any]], bandwidth: float | None
) -> list[dict[str, Any]]:
    """Median time per SGMV launch of a layer, and counted bytes over it.

    launches: of one layer, in order, each with kernel, group and bytes; a step repeats them layer by layer.
    """
    found = [kernel for kernel in kernels if re.match(SGMV_KERNELS, kernel.name)]
    samples = _by_launch([kernel.name for kernel in found], launches)
    return [
        _share(launch, median(found[at].duration for at in places) / 1e9, launch["bytes"], bandwidth, len(places))
        for launch, places in zip(launches, samples, strict=True)
    ]


def sgmv_from_counters(
    profiled: Sequence[Counters], launches: Sequence[Mapping[str, Any]], bandwidth: float | None
) -> list[dict[str, Any]]:
    """As `sgmv_from_trace`, with the bytes that memory moved beside the counted ones."""
    found = [kernel for kernel in profiled if re.match(SGMV_KERNELS, kernel.name)]
    rows = []
    for launch, places in zip(launches, _by_launch([kernel.name for kernel in found], launches), strict=True):
        metrics = [found[at].metrics for at in places]
        seconds = median(each["gpu__time_duration.sum"] for each in metrics) / 1e9
        moved = median(each["dram__bytes_read.sum"] + each["dram__bytes_write.sum"] for each in metrics)
        row = _share(launch, seconds, launch["bytes"], bandwidth, len(places))
        row |= {
            "dram_bytes": moved,
            "dram_over_counted": moved / launch["bytes"],
            "dram_bytes_per_s": moved / seconds,
            "peak_percent": median(each["dram__throughput.avg.pct_of_peak_sustained_elapsed"] for each in metrics),
            "registers": median(each["launch__registers_per_thread"] for each in metrics),
        }
        rows.append(row)
    return rows


def counters(text: str) -> list[Counters]:
    """`ncu --csv`, a row per kernel (`--page raw`) or one per kernel and metric."""
    rows = _rows(text, '"ID"')
    if rows and "Metric Name" in rows[0]:
        return _long_counters(rows)
    fixed = {"ID", "Process ID", "Process Name", "Host Name", "Kernel Name", "Context", "Stream", "Block Size",
             "Grid Size", "Device", "CC"}  # fmt: skip
    return [
        Counters(
            row["Kernel Name"],
            {
                name: number
                for name, value in row.items()
                if name not in fixed and (number := _number(value)) is not None
            },
        )
        for row in rows
        if row["ID"]  # the row below the titles has units
    ]


def _long_counters(rows: Iterable[Mapping[str, str]]) -> list[Counters]:
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in rows:
        _, metrics = found.setdefault(row["ID"], (row["Kernel Name"], {}))
        if (number := _number(row["Metric Value"])) is not None:
            metrics[row["Metric Name"]] = number
    return [Counters(name, metrics) for name, metrics in found.values()]


def _by_launch(names: Sequence[str], launches: Sequence[Mapping[str, Any]]) -> list[list[int]]:
    """Launches of a layer, by the kernels `names`. UnreadableReport when they don't follow its order."""
    wanted = [launch["kernel"] for launch in launches]
    whole = len(names) - len(names) % len(wanted)  # profilers may stop in the middle of a layer
    if not whole:
        raise UnreadableReport(f"{len(names)} SGMV kernels were seen, a layer has {len(wanted)}")
    for index in range(whole):
        if not names[index].startswith(wanted[index % len(wanted)]):
            raise UnreadableReport(
                f"SGMV kernel {index} is {names[index]}, a layer's launch {index % len(wanted)} is "
                f"{wanted[index % len(wanted)]}: the workload's description belongs to another run"
            )
    return [list(range(at, whole, len(wanted))) for at in range(len(wanted))]


def _share(
    launch: Mapping[str, Any], seconds: float, num_bytes: float, bandwidth: float | None, count: int
) -> dict[str, Any]:
    return {
        "kernel": launch["kernel"],
        "group": launch["group"],
        "count": count,
        "us": seconds * 1e6,
        "bytes": num_bytes,
        "bytes_per_s": num_bytes / seconds,
        "share": None if bandwidth is None else num_bytes / seconds / bandwidth,
    }


def _rows(text: str, title: str) -> list[dict[str, str]]:
    """The table that begins with the line that `title` begins; what a tool says before and after it is left out."""
    lines = text.splitlines()
    begin = next((at for at, line in enumerate(lines) if line.lstrip("\ufeff").startswith(title)), None)
    if begin is None:
        raise UnreadableReport(f"no table begins with {title}; the output begins with {text[:200]!r}")
    table = io.StringIO("\n".join(line for line in lines[begin:] if line and not line.startswith("==")))
    return [row for row in csv.DictReader(table) if None not in row.values()]


def _number(text: str) -> float | None:
    """A number with or without separators of thousands; None for a word."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None
