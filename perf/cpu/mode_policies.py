"""Throughput with a policy of modes beside the two fixed modes, by skewness, in turns in one process.

    python -m chorus.perf.cpu.mode_policies

Eight clients each send the next request when the last one is answered. A request has one adapter, of the mean rank,
with the probability `skew`, else another one or none, all alike often. unmerged: nothing is merged. merged: that one
adapter is, all the time, and the others run beside it. Policy and modes each have an engine and clients of their own,
which send the same requests, and take turns of a few steps, so that all three meet the same machine. Ratios are of
tokens per second over all turns, with the standard error of the mean of the turns' ratios. The policy keeps what it has
learned.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ..report.command import parser
from .decoding import add_options, workload_of
from .merged import Bench

MODES = ("unmerged", "merged", "policy")


class Clients:
    """Clients of an engine that are never without a request."""

    def __init__(self, bench: Bench, mode: str) -> None:
        self.bench = bench
        self._others = [None, *(name for name in bench.names if name != bench.merged)]
        self._source, self._skew = random.Random(), 0.0
        if mode == "merged":
            bench.set_mode(bench.merged)

    def start(self, skew: float, count: int) -> None:
        """Have so many clients ask for the first time; requests that are there are given up."""
        scheduler = self.bench.engine.scheduler
        for request in [*scheduler.running, *scheduler.waiting]:
            self.bench.engine.abort(request.id)
        self._source, self._skew = random.Random(count), skew
        for _ in range(count):
            self._ask()

    def turn(self, steps: int) -> tuple[int, float]:
        """Return the tokens of so many steps, and their seconds."""
        engine = self.bench.engine
        before, began = engine.stats().num_generated_tokens, time.perf_counter()
        for _ in range(steps):
            for output in engine.step():
                if output.finish_reason is not None:
                    self._ask()
        seconds = time.perf_counter() - began
        return engine.stats().num_generated_tokens - before, seconds

    def _ask(self) -> None:
        source = self._source
        adapter = self.bench.merged if source.random() < self._skew else source.choice(self._others)
        self.bench.add(adapter, source.randint(24, 72))


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--skews", type=_numbers, default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="P,…")
    command.add_argument("--turns", type=int, default=100, help="of each mode at each skew")
    command.add_argument("--steps", type=int, default=4, help="of a turn")
    policies = ("fastest", "dlora-1", "dlora-2", "dlora-3", "dlora-artifact")
    command.add_argument("--policy", choices=policies, default="fastest")
    add_options(command)
    args = command.parse_args(argv)
    workload = workload_of(args)
    found = {}
    print(
        f"{'skew':>5}" + "".join(f"{mode:>10}" for mode in MODES) + f"{'of unmerged':>17}{'of merged':>17}{'merges':>8}"
    )
    with tempfile.TemporaryDirectory(prefix="chorus-modes-") as directory:
        clients = {}
        for mode in MODES:
            policy = args.policy if mode == "policy" else "manual"
            clients[mode] = Clients(Bench(workload, Path(directory), policy), mode)
        engine = clients["policy"].bench.engine
        for skew in args.skews:
            for each in clients.values():
                each.start(skew, workload.requests)
                each.turn(args.steps)  # warms up
            merges, turns = engine.merging.num_merges, {mode: [] for mode in MODES}
            for number in range(args.turns):
                for mode in MODES[:: 1 if number % 2 else -1]:
                    turns[mode].append(clients[mode].turn(args.steps))
            found[f"{skew:g}"] = line = {mode: _rate(turns[mode]) for mode in MODES}
            line["merges"] = engine.merging.num_merges - merges
            for mode in MODES[:2]:
                line[f"of_{mode}"] = line["policy"] / line[mode]
                line[f"of_{mode}_error"] = _error(turns["policy"], turns[mode])
            print(f"{skew:5.2f}" + "".join(f"{line[mode]:10.0f}" for mode in MODES), end="")
            print("".join(f"{line[f'of_{mode}']:10.3f} ±{line[f'of_{mode}_error']:.3f}" for mode in MODES[:2]), end="")
            print(f"{line['merges']:8.0f}", flush=True)
        modes = engine.modes
        assert modes is not None
        if modes.measured_seconds:
            print(f"decode steps differ by {modes.wrong_seconds / modes.measured_seconds:.1%} from what was predicted")
        for each in clients.values():
            each.bench.engine.close()
    print(json.dumps({"mode_policies": found}))
    return 0


def _rate(turns: Sequence[tuple[int, float]]) -> float:
    return sum(tokens for tokens, _ in turns) / sum(seconds for _, seconds in turns)


def _error(turns: Sequence[tuple[int, float]], others: Sequence[tuple[int, float]]) -> float:
    ratios = [_rate([turn]) / _rate([other]) for turn, other in zip(turns, others, strict=True)]
    return statistics.stdev(ratios) / math.sqrt(len(ratios))


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
