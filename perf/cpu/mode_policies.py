"""Throughput with a policy of modes beside the two fixed modes, by skewness, in turns in one process.

    python -m chorus.perf.cpu.mode_policies

Eight clients each send the next request when the last one is answered. A request has one adapter, of the mean rank,
with the probability `skew`, else another one or none, all alike often. unmerged: nothing is merged. merged: that
adapter is, all the time, and the others run along. A round has the same requests for all three, which go on for as
long. A ratio is the median over rounds. The policy goes on with what it learned in the rounds before, as in a server.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from .merged import Bench
from .workload import Geometry, Workload

MODES = ("unmerged", "merged", "policy")


class Clients:
    """Clients of an engine that are never without a request."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.modes = bench.engine.modes
        self._others = [None, *(name for name in bench.names if name != bench.merged)]

    def set_mode(self, mode: str) -> None:
        """Have steps run in one of `MODES`."""
        engine = self.bench.engine
        engine.modes, engine.scheduler.only = None, None
        if mode == "policy":
            engine.modes = self.modes
        else:
            self.bench.set_mode(self.bench.merged if mode == "merged" else None)

    def run(self, skew: float, seconds: float, seed: int, count: int) -> float:
        """Return the tokens a second that so many clients get in so many seconds."""
        bench, engine, source = self.bench, self.bench.engine, random.Random(seed)

        def ask() -> None:
            adapter = bench.merged if source.random() < skew else source.choice(self._others)
            bench.add(adapter, source.randint(24, 72))

        for _ in range(count):
            ask()
        before, began = engine.stats().num_generated_tokens, time.perf_counter()
        spent = 0.0
        while spent < seconds:
            for output in engine.step():
                if output.finish_reason is not None:
                    ask()
            spent = time.perf_counter() - began
        rate = (engine.stats().num_generated_tokens - before) / spent
        for request in [*engine.scheduler.running, *engine.scheduler.waiting]:
            engine.abort(request.id)
        return rate


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.cpu.mode_policies", description=__doc__.split("\n")[0])
    parser.add_argument("--skews", type=_numbers, default=[0.0, 0.25, 0.5, 0.75, 1.0], metavar="P,…")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.5, help="of each mode and skew in a round")
    parser.add_argument("--policy", choices=("fastest", "dlora-1", "dlora-2", "dlora-3"), default="fastest")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--geometry", type=Geometry.parse, default=Geometry(), help="as of perf.cpu")
    args = parser.parse_args(argv)
    workload = Workload(args.geometry, dtype=args.dtype, threads=args.threads, ranks=(8, 16, 32, 64))
    rates: dict[tuple[float, str], list[float]] = {(skew, mode): [] for skew in args.skews for mode in MODES}
    with tempfile.TemporaryDirectory(prefix="chorus-modes-") as directory:
        clients = Clients(Bench(workload, Path(directory), args.policy))
        for number in range(args.rounds + 1):
            for skew in args.skews:
                for mode in MODES[:: 1 if number % 2 else -1]:
                    clients.set_mode(mode)
                    rates[skew, mode].append(clients.run(skew, args.seconds, number, workload.requests))
        clients.bench.engine.close()
    found = {}
    print(f"{'skew':>5}" + "".join(f"{mode:>10}" for mode in MODES) + f"{'of unmerged':>13}{'of merged':>11}")
    for skew in args.skews:
        unmerged, merged, policy = (rates[skew, mode][1:] for mode in MODES)  # the first round warms up
        of_unmerged, of_merged = (_ratio(policy, fixed) for fixed in (unmerged, merged))
        medians = [statistics.median(each) for each in (unmerged, merged, policy)]
        print(f"{skew:5.2f}" + "".join(f"{rate:10.0f}" for rate in medians) + f"{of_unmerged:13.3f}{of_merged:11.3f}")
        found[f"{skew:g}"] = {
            **dict(zip(MODES, medians, strict=True)), "of_unmerged": of_unmerged, "of_merged": of_merged,
        }  # fmt: skip
    modes = clients.modes
    if modes is not None and modes.measured_seconds:
        print(f"decode steps differ by {modes.wrong_seconds / modes.measured_seconds:.1%} from what was predicted")
    print(json.dumps({"mode_policies": found}))
    return 0


def _ratio(ones: list[float], others: list[float]) -> float:
    return statistics.median(one / other for one, other in zip(ones, others, strict=True))


def _numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
