"""This machine: its processor's name, CPU time of processes, and the share of CPU time that other processes had.

CPU time is Linux's, through psutil: `pip install 'chorus-lora[bench]'`.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from psutil import Process

#: A sample does not count if other processes had more than this share of the machine's CPU time.
FOREIGN_LIMIT = 0.05


@dataclass(frozen=True)
class CpuSample:
    """Seconds since boot or start: the clock, all busy time of the machine, the time of the watched processes, and the
    hypervisor's part of the busy time.
    """

    clock: float
    busy: float
    own: float
    stolen: float = 0.0

    @classmethod
    def take(cls, pids: Iterable[int]) -> CpuSample:
        psutil = need_psutil()
        user, nice, system, _, _, irq, softirq, steal = psutil.cpu_times()[:8]  # idle and iowait are left out
        own = 0.0
        for process in family(pids):
            with suppress(psutil.NoSuchProcess):
                own += sum(process.cpu_times()[:4])  # includes its children that have ended
        return cls(time.monotonic(), user + nice + system + irq + softirq + steal, own, steal)

    def foreign_share(self, earlier: CpuSample) -> float:
        """Share of the machine's time since `earlier` that others had; 0 for spans too short to tell."""
        return self._share((self.busy - earlier.busy) - (self.own - earlier.own), earlier)

    def stolen_share(self, earlier: CpuSample) -> float:
        """The hypervisor's part of `foreign_share`."""
        return self._share(self.stolen - earlier.stolen, earlier)

    def speed(self, earlier: CpuSample) -> float:
        """The part of the busy time since `earlier` without the hypervisor's."""
        busy = self.busy - earlier.busy
        return 1 - (self.stolen - earlier.stolen) / busy if busy > 0 else 1.0

    def _share(self, seconds: float, earlier: CpuSample) -> float:
        capacity = (self.clock - earlier.clock) * (os.cpu_count() or 1)
        return max(0.0, seconds / capacity) if capacity > 0.2 else 0.0


def need_psutil() -> ModuleType:
    """psutil. Ends the command if it is missing."""
    try:
        import psutil
    except ImportError:
        raise SystemExit("measuring other processes' share needs psutil: pip install 'chorus-lora[bench]'") from None
    return psutil


def family(pids: Iterable[int]) -> set[Process]:
    """The processes and all their descendants."""
    psutil, found = need_psutil(), set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
    return found


def queued_seconds(schedstat: Path = Path("/proc/thread-self/schedstat")) -> float:
    """How long the calling thread could have run and had no processor; 0 where the system does not tell."""
    try:
        return int(schedstat.read_text("ascii").split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        return 0.0


def processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name, with its family and model: a hypervisor's name may hide which generation it is."""
    lines = (line.partition(":") for line in cpuinfo.read_text("utf-8").splitlines()) if cpuinfo.exists() else ()
    fields: dict[str, str] = {}
    for name, _, value in lines:
        fields.setdefault(name.strip(), value.strip())
    if "model name" not in fields:
        return platform.machine()
    told = [f"{name} {value}" for name in ("family", "model") if (value := fields.get(f"cpu {name}", fields.get(name)))]
    return ", ".join([fields["model name"], *told])
