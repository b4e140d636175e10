"""Measuring several contenders in turn, round after round, and keeping only samples that no other process disturbed.

The other processes' time is that of Linux, by psutil: `pip install 'chorus-lora[bench]'`.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ..contenders.process import ContenderError, ContenderProcess

if TYPE_CHECKING:
    from psutil import Process

#: A sample does not count if other processes had more than this share of the machine's processor time.
FOREIGN_LIMIT = 0.05


@dataclass(frozen=True)
class Probe:
    """One thing to measure in every round: a method of a contender's process.

    derive: adds to the values what follows from them.
    """

    contender: str
    name: str
    process: ContenderProcess
    method: str
    arguments: dict[str, Any] = field(default_factory=dict)
    derive: Callable[[dict[str, Any]], dict[str, Any]] = lambda values: values


@dataclass(frozen=True)
class Sample:
    """Values of a probe in one round, and the share of processor time that other processes had meanwhile."""

    round: int
    values: dict[str, Any]
    foreign: float

    @property
    def quiet(self) -> bool:
        return self.foreign <= FOREIGN_LIMIT


@dataclass
class Results:
    """Samples by (contender, probe name), and the errors of probes that had to be given up."""

    samples: dict[tuple[str, str], list[Sample]] = field(default_factory=dict)
    errors: dict[tuple[str, str], str] = field(default_factory=dict)

    def counted(self, contender: str, name: str) -> list[Sample]:
        """The quiet samples; all of them when none was quiet."""
        found = self.samples.get((contender, name), [])
        return [sample for sample in found if sample.quiet] or found

    def is_noisy(self, contender: str, name: str) -> bool:
        """True if no sample was quiet."""
        return not any(sample.quiet for sample in self.samples.get((contender, name), []))

    def median(self, contender: str, name: str, value: str) -> float | None:
        values = [
            sample.values[value] for sample in self.counted(contender, name) if sample.values.get(value) is not None
        ]
        return median(values) if values else None

    def best(self, contender: str, name: str, value: str) -> float | None:
        """The largest value of any round: noise can only lower what a machine can do."""
        return max((sample.values[value] for sample in self.samples.get((contender, name), [])), default=None)

    def values(
        self, contender: str, name: str, pick: Callable[[str, str, str], float | None] | None = None
    ) -> dict[str, float]:
        """All values of a probe, of each the median over rounds or what `pick` takes; none where it was given up."""
        counted = self.counted(contender, name)
        return {
            value: (pick or self.median)(contender, name, value) for value in (counted[0].values if counted else ())
        }

    def ratio(self, above: tuple[str, str, str], below: tuple[str, str, str]) -> float | None:
        """Median over rounds of `above / below`, each (contender, probe, value); else of their medians."""
        tops, bottoms = (
            {
                sample.round: sample.values[value]
                for sample in self.counted(contender, name)
                if sample.values.get(value) is not None
            }
            for contender, name, value in (above, below)
        )
        if common := [tops[index] / bottoms[index] for index in tops.keys() & bottoms.keys()]:
            return median(common)
        return median(tops.values()) / median(bottoms.values()) if tops and bottoms else None


def run_rounds(probes: Sequence[Probe], rounds: int, settle: float, progress: Callable[[str], None]) -> Results:
    """One round that is dropped, then `rounds` that count. A probe that fails is not tried again.

    settle: seconds of rest before each sample, so that the threads of the one before have stopped spinning.
    """
    results = Results()
    for index in range(rounds + 1):
        foreign = []
        for probe in probes:
            key = probe.contender, probe.name
            if key in results.errors:
                continue
            time.sleep(settle)
            pids = (os.getpid(), probe.process.pid)
            before = CpuSample.take(pids)
            try:
                values = probe.derive(probe.process.call(probe.method, **probe.arguments))
            except ContenderError as error:
                results.errors[key] = str(error)
                progress(f"{probe.contender} {probe.name} given up: {error}")
                continue
            sample = Sample(index, values, CpuSample.take(pids).foreign_share(before))
            foreign.append(sample.foreign)
            if index:
                results.samples.setdefault(key, []).append(sample)
        noisy = f"{sum(share > FOREIGN_LIMIT for share in foreign)} of {len(foreign)} samples disturbed"
        progress(f"round {index} of {rounds}: {noisy}, at most {max(foreign, default=0.0):.0%} foreign")
    return results


@dataclass(frozen=True)
class CpuSample:
    """Seconds since boot or start: the clock, all busy time of the machine, the time of the watched processes, and the
    part of the busy time that a hypervisor took.
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
                own += sum(process.cpu_times()[:4])  # its children that have ended are in it
        return cls(time.monotonic(), user + nice + system + irq + softirq + steal, own, steal)

    def foreign_share(self, earlier: CpuSample) -> float:
        """Share of the machine's time since `earlier` that others had; 0 for spans too short to tell."""
        return self._share((self.busy - earlier.busy) - (self.own - earlier.own), earlier)

    def stolen_share(self, earlier: CpuSample) -> float:
        """The part of `foreign_share` that a hypervisor had."""
        return self._share(self.stolen - earlier.stolen, earlier)

    def speed(self, earlier: CpuSample) -> float:
        """The part of the busy time since `earlier` that a hypervisor left."""
        busy = self.busy - earlier.busy
        return 1 - (self.stolen - earlier.stolen) / busy if busy > 0 else 1.0

    def _share(self, seconds: float, earlier: CpuSample) -> float:
        capacity = (self.clock - earlier.clock) * (os.cpu_count() or 1)
        return max(0.0, seconds / capacity) if capacity > 0.2 else 0.0


def need_psutil() -> ModuleType:
    """psutil. Ends the command without it."""
    try:
        import psutil
    except ImportError:
        raise SystemExit("to see what other processes take needs psutil: pip install 'chorus-lora[bench]'") from None
    return psutil


def family(pids: Iterable[int]) -> set[Process]:
    """The processes and all their descendants."""
    psutil, found = need_psutil(), set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            found |= {process, *process.children(recursive=True)}
    return found


def processor() -> str:
    """The processor's name."""
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
