"""Processor time by its owner: what other processes took while something was measured. Linux only (`/proc`)."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")
_IDLE = (3, 4)  # idle, iowait; everything else in the line is time that someone had, the hypervisor included


@dataclass(frozen=True)
class CpuSample:
    """Seconds since boot or start: the clock, all busy time of the machine, the time of the watched processes."""

    clock: float
    busy: float
    own: float

    @classmethod
    def take(cls, pids: Iterable[int]) -> CpuSample:
        fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        busy = sum(value for index, value in enumerate(fields) if index not in _IDLE) / _TICKS
        return cls(time.monotonic(), busy, sum(_seconds(pid) for pid in family(pids)))

    def foreign_share(self, earlier: CpuSample) -> float:
        """Share of the machine's time since `earlier` that others had; 0 for spans too short to tell."""
        capacity = (self.clock - earlier.clock) * (os.cpu_count() or 1)
        foreign = (self.busy - earlier.busy) - (self.own - earlier.own)
        return max(0.0, foreign / capacity) if capacity > 0.2 else 0.0


def family(pids: Iterable[int]) -> set[int]:
    """The processes and all their descendants."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents.setdefault(int(_after_name(stat)[1]), []).append(int(stat.parent.name))
        except OSError:
            continue
    found, queue = set(), list(pids)
    while queue:
        pid = queue.pop()
        if pid not in found:
            found.add(pid)
            queue += parents.get(pid, ())
    return found


def _seconds(pid: int) -> float:
    """User and system time of a process and of its children that have ended; 0 when it is gone."""
    try:
        fields = _after_name(Path(f"/proc/{pid}/stat"))
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / _TICKS


def _after_name(stat: Path) -> list[str]:
    """The fields after the command name, which may hold spaces and brackets; the first is the state."""
    return stat.read_text().rpartition(")")[2].split()


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
