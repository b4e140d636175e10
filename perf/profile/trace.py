"""Kernels and steps of a recorded run, from torch.profiler's trace or from Nsight Systems' tables.

Tests: tests/perf/profile/test_trace.py
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

#: Name of the span around each step of a profiled run.
STEP = "chorus.step"

#: Categories of a trace's events that are work of a GPU.
_DEVICE = frozenset(["kernel", "gpu_memcpy", "gpu_memset"])

#: Categories of the host's calls that launch it.
_HOST = frozenset(["cuda_runtime", "cuda_driver"])


class TraceError(ValueError):
    """The file is not a trace of steps."""


class Kernel(NamedTuple):
    """Work of the device. Times are in microseconds."""

    name: str
    start: float
    duration: float
    stream: int = 0
    launch: int = -1
    """The launch that it belongs to: all kernels of a graph's replay have one."""
    replayed: bool = False
    """True for a node of a captured graph."""

    @property
    def end(self) -> float:
        return self.start + self.duration


class Launch(NamedTuple):
    """A call of the host that launched kernels. Times are in microseconds."""

    name: str
    start: float

    @property
    def replays(self) -> bool:
        return "GraphLaunch" in self.name  # cudaGraphLaunch, cuGraphLaunch, with or without a version


@dataclass(frozen=True)
class Step:
    """The kernels that a step launched, in the order in which they began. host_us: microseconds of its call."""

    host_us: float
    kernels: Sequence[Kernel] = field(default_factory=list)

    @property
    def device_us(self) -> float:
        """From the first kernel's begin to the last one's end."""
        return max(each.end for each in self.kernels) - self.kernels[0].start if self.kernels else 0.0

    @property
    def busy_us(self) -> float:
        """Time in which at least one kernel ran."""
        return sum(spent for _, spent, _ in self.timeline())

    @property
    def in_graphs(self) -> int:
        """Number of kernels that were replayed from a captured graph."""
        return sum(kernel.replayed for kernel in self.kernels)

    def timeline(self) -> Iterator[tuple[Kernel, float, float]]:
        """Each kernel, the time that it ran after all before it had ended, and the idle time before it.

        A dependent launch begins while the kernel before it runs, and waits for it. Such time counts once, for the
        kernel that began first: so these times and gaps add up to the step's.
        """
        reached = self.kernels[0].start if self.kernels else 0.0
        for kernel in self.kernels:
            yield kernel, max(0.0, kernel.end - max(kernel.start, reached)), max(0.0, kernel.start - reached)
            reached = max(reached, kernel.end)


def read_chrome(path: Path) -> list[Step]:
    """Steps of a trace that torch.profiler exported. On a CPU the outermost operators are the kernels.

    Raises TraceError.
    """
    try:
        events = json.loads(path.read_text("utf-8"))["traceEvents"]
    except (ValueError, KeyError, TypeError) as error:
        raise TraceError(f"{path} is not a trace of torch.profiler: {type(error).__name__}: {error}") from None
    complete = [event for event in events if event.get("ph") == "X"]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in complete if _is_span(event)]
    kernels = [_kernel(event) for event in complete if event.get("cat") in _DEVICE]
    if not kernels:
        kernels = list(_outermost(event for event in complete if event.get("cat") == "cpu_op"))
    launches = {
        int(event["args"]["correlation"]): Launch(event["name"], event["ts"])
        for event in complete
        if event.get("cat") in _HOST and "correlation" in event.get("args", {})
    }
    return _split(spans, kernels, launches, str(path))


def read_nsight(kernels: str, calls: str, spans: str) -> list[Step]:
    """Steps of Nsight Systems' tables `cuda_gpu_trace`, `cuda_api_trace` and `nvtx_pushpop_trace`, as CSV.

    Raises TraceError.
    """
    found = [
        Kernel(
            row["Name"],
            int(row["Start (ns)"]) / 1e3,
            int(row["Duration (ns)"]) / 1e3,
            int(row.get("Strm") or 0),
            int(row.get("CorrId") or -1),
        )
        for row in _rows(kernels, "Start (ns)")
    ]
    launches = {
        int(row["CorrID"]): Launch(row["Name"], int(row["Start (ns)"]) / 1e3) for row in _rows(calls, "Start (ns)")
    }
    begun = [
        (int(row["Start (ns)"]) / 1e3, int(row["End (ns)"]) / 1e3)
        for row in _rows(spans, "Start (ns)")
        if row["Name"].rpartition(":")[2] == STEP  # after the domain
    ]
    return _split(begun, found, launches, "the report")


def _rows(text: str, column: str) -> Iterator[Mapping[str, str]]:
    """Rows of a table in CSV; lines before its head, which tools print, are skipped."""
    lines = text.splitlines()
    for index, line in enumerate(lines):
        if column in line:
            return csv.DictReader(io.StringIO("\n".join(lines[index:])))
    raise TraceError(f"the report has no table with a column {column!r}; it begins with {text[:80]!r}")


def _is_span(event: Mapping[str, Any]) -> bool:
    return event.get("name") == STEP and event.get("cat") in ("user_annotation", "cpu_op")


def _kernel(event: Mapping[str, Any]) -> Kernel:
    args = event.get("args", {})
    return Kernel(
        event["name"],
        event["ts"],
        event["dur"],
        stream=int(args.get("stream", 0)),
        launch=int(args.get("correlation", -1)),
        replayed=bool(args.get("graph node id", 0)),  # CUPTI of CUDA 13.0 names none
    )


def _outermost(events: Iterable[Mapping[str, Any]]) -> Iterator[Kernel]:
    """Operators that no other one of their thread called."""
    reached: dict[Any, float] = {}
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["name"] != STEP and event["ts"] >= reached.get(event["tid"], 0.0):
            reached[event["tid"]] = event["ts"] + event["dur"]
            yield Kernel(event["name"], event["ts"], event["dur"])


def _split(
    spans: Sequence[tuple[float, float]], kernels: Iterable[Kernel], launches: Mapping[int, Launch], source: str
) -> list[Step]:
    """Give each step the kernels that were launched within it. They may run later: the host prepares a step while the
    one before it runs. A kernel whose launch is not known belongs to the step in which it began.
    """
    if not spans:
        raise TraceError(f"{source} has no span named {STEP!r}: record it with `python -m chorus.perf.profile`")
    found: list[tuple[float, Kernel]] = []
    for kernel in sorted(kernels, key=lambda kernel: kernel.start):
        launch = launches.get(kernel.launch, Launch("", kernel.start))
        found.append((launch.start, kernel._replace(replayed=kernel.replayed or launch.replays)))
    return [
        Step(end - begin, [kernel for launched, kernel in found if begin <= launched < end])
        for begin, end in sorted(spans)
    ]
