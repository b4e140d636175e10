"""Decode steps of several ranks of one thread each, beside one rank with as many threads, in turns.

    python -m chorus.perf.cpu.ranks

Eight requests decode at once, of the base model or with adapters. A ratio is the median over rounds of one rank's
median step over the ranks' of the same round: 1 is as fast, less is slower. Beside it the same of processor time, which
other processes disturb less: a thread's share of one rank's over that of the busiest rank, with waiting by spinning.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Literal

from ...core.executors.ranks import RanksExecutor
from ..report.command import parser
from .decoding import Decoding, add_options, workload_of
from .workload import Workload


class Bench(Decoding):
    """An engine of `ranks` ranks."""

    def __init__(self, workload: Workload, directory: Path, ranks: int, kernels: Literal["native", "torch"]) -> None:
        super().__init__(
            workload, directory, copies=ranks, tensor_parallel_size=ranks, cpu_kernels=kernels, device="cpu"
        )
        self._threads = workload.threads
        self._others = self.engine.executor.pids if isinstance(self.engine.executor, RanksExecutor) else []

    def run(self, adapters: list[str | None], steps: int) -> tuple[float, float]:
        """Median seconds of a decode step, and mean seconds of processor time of its busiest rank, a thread's share."""
        self.begin(adapters, steps + 8)
        used = self._used()
        seconds = self.step_seconds(steps)
        busiest = max(after - before for before, after in zip(used, self._used(), strict=True))
        self.finish()
        return seconds, busiest / steps / (self._threads // len(used))

    def _used(self) -> list[float]:
        """Seconds of processor time of each rank so far."""
        return [time.process_time(), *(_process_seconds(pid) for pid in self._others)]


def _process_seconds(pid: int) -> float:
    """Processor time of a process, in ticks of the system."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--steps", type=int, default=40, help="decode steps of each engine in a round")
    command.add_argument("--kernels", choices=("native", "torch"), default="native")
    add_options(command)
    args = command.parse_args(argv)
    workload = workload_of(args)
    rounds: list[dict[str, tuple[float, float]]] = []
    with tempfile.TemporaryDirectory(prefix="chorus-ranks-") as directory:
        benches = {size: Bench(workload, Path(directory), size, args.kernels) for size in (1, args.threads)}
        names = benches[1].names
        mixes = {"base": [None] * workload.requests, "adapters": [names[i % len(names)] for i in range(8)]}
        for index in range(args.rounds + 1):
            order = list(benches) if index % 2 else list(benches)[::-1]
            rounds.append(
                {f"{mix} {size}": benches[size].run(mixes[mix], args.steps) for mix in mixes for size in order}
            )
        for bench in benches.values():
            bench.engine.close()
    del rounds[0]
    found = {}
    print(f"{'8 requests decode':28}{'1 rank, ms':>12}{f'{args.threads} ranks, ms':>14}{'ratio':>8}   of each round")
    for mix, at in ((mix, at) for mix in mixes for at in range(2)):
        one, several = ([each[f"{mix} {size}"][at] for each in rounds] for size in benches)
        ratios = [a / b for a, b in zip(one, several, strict=True)]
        ratio, label = statistics.median(ratios), f"{mix}, {('time', 'processor time')[at]}"
        print(f"{label:28}{statistics.median(one) * 1e3:12.2f}{statistics.median(several) * 1e3:14.2f}", end="")
        print(f"{ratio:8.3f}  ", *(f"{each:.2f}" for each in sorted(ratios)))
        found[label] = {"one": one, "several": several, "ratio": ratio}
    print(json.dumps({"ranks": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
