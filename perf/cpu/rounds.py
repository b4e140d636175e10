"""Measuring several contenders in turn, round after round, and keeping only what others did not disturb."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from ..contenders.process import ContenderError, ContenderProcess
from .cpu_time import CpuSample

#: Above this share of the machine's processor time in other hands, a sample does not count.
FOREIGN_LIMIT = 0.05

_QUIET_SPAN = 0.5


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
    """Values of a probe in one round, and the share of processor time that others had meanwhile."""

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


@dataclass(frozen=True)
class Patience:
    """Rules for measuring on a machine that others use too.

    settle: seconds of rest before each sample, so that the threads of the one before have stopped spinning.
    wait: seconds to wait, at most, until the machine is quiet. retries: how often a disturbed sample is taken again.
    """

    settle: float = 0.5
    wait: float = 0.0
    retries: int = 0


def run_rounds(probes: Sequence[Probe], rounds: int, patience: Patience, progress: Callable[[str], None]) -> Results:
    """One round that is dropped, then `rounds` that count. A probe that fails is not tried again."""
    results = Results()
    for index in range(rounds + 1):
        for probe in probes:
            key = probe.contender, probe.name
            if key in results.errors:
                continue
            try:
                sample = _take(probe, index, patience if index else replace(patience, wait=0.0, retries=0))
            except ContenderError as error:
                results.errors[key] = str(error)
                progress(f"{probe.contender} {probe.name} given up: {error}")
                continue
            if index:
                results.samples.setdefault(key, []).append(sample)
        progress(f"round {index} of {rounds}{_noise(results, index)}")
    return results


def _take(probe: Probe, index: int, patience: Patience) -> Sample:
    """A quiet sample, or the least disturbed one of a few tries."""
    samples: list[Sample] = []
    while not samples or (not samples[-1].quiet and len(samples) <= patience.retries):
        time.sleep(patience.settle)
        _await_quiet(patience.wait)
        pids = (os.getpid(), probe.process.pid)
        before = CpuSample.take(pids)
        values = probe.process.call(probe.method, **probe.arguments)
        samples.append(Sample(index, probe.derive(values), CpuSample.take(pids).foreign_share(before)))
    return min(samples, key=lambda sample: sample.foreign)


def _await_quiet(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        before = CpuSample.take((os.getpid(),))
        time.sleep(_QUIET_SPAN)
        if CpuSample.take((os.getpid(),)).foreign_share(before) <= FOREIGN_LIMIT:
            return


def _noise(results: Results, index: int) -> str:
    foreign = [sample.foreign for sample in _all(results) if sample.round == index]
    noisy = sum(share > FOREIGN_LIMIT for share in foreign)
    return f": {noisy} of {len(foreign)} samples disturbed, at most {max(foreign):.0%} foreign" if foreign else ""


def _all(results: Results) -> Iterable[Sample]:
    return (sample for samples in results.samples.values() for sample in samples)
