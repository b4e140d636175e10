"""Times and regret of migration plans: `python -m chorus.perf.serving.placement_plans`.

Requests lie unevenly on replicas: a replica's share falls with its rank, as 1/rank, an adapter's share of the requests
likewise. Each planner is given the same problems, of the K most and the K least loaded replicas. Regret is the relative
distance of the longest replica's time from the linear program's bound, so an upper bound of the plan's distance from
the optimum; `stay` is the regret of moving nothing. Times are CPU times of one thread, without computing the bound.

The gate compares regrets, which are reproducible if the integer program ends by its nodes and not by its time, and
times relative to that of a fixed loop. `--programs-to` leaves out the planners that need HiGHS where they would take
minutes.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from ...server.cluster.placement.migration import Migration, Movable
from ...server.cluster.placement.plan import NEED_HIGHS, planned
from ...server.cluster.placement.problem import Problem
from ...server.cluster.placement.program import Program
from ...server.cluster.placement.settings import PLANNERS, MigrationSettings
from ...server.cluster.router import ReplicaState
from ..bench.machine import processor
from ..report.command import conclude, parser
from ..report.table import rows_table
from .decision_time import loop_us

SLOTS, BLOCK_TOKENS, TOKENS = 32, 16, 32 * 2048
ADAPTER_PAGES, LOAD_SECONDS, PREFILL_SECONDS = 20, 0.005, 1e-4
"""Pages of an adapter of rank 16, its copy over PCIe, and a token's prefill, for a 7B model on an A100, in round
numbers.
"""


def uneven(seed: int, replicas: int, requests: int, adapters: int, most_replicas: int) -> Problem:
    """A problem of a cluster. most_replicas: K."""
    draws = np.random.default_rng(seed)
    home = draws.choice(replicas, requests, p=_shares(replicas))
    names = [f"adapter-{index}" for index in draws.choice(adapters, requests, p=_shares(adapters))]
    tokens = np.minimum(draws.lognormal(5.5, 1.2, requests), 2048).astype(int) + 1
    seconds = dict(zip((f"adapter-{index}" for index in range(adapters)), draws.uniform(2, 10, adapters), strict=True))
    states = []
    for index in range(replicas):
        here = home == index
        used = int(tokens[here].sum())
        held = frozenset(name for name, at in zip(names, here, strict=True) if at)
        held |= {f"adapter-{number}" for number in draws.choice(adapters, min(adapters, 8), replace=False)}
        states.append(
            ReplicaState(SLOTS, int(here.sum()), kv_tokens=used, free_tokens=max(0, TOKENS - used), resident=held)
        )
    asked = [
        Movable(
            str(index),
            int(at),
            adapter=name,
            tokens=int(count),
            has_kv=True,
            run_seconds=seconds[name],
            prefill_seconds=PREFILL_SECONDS * int(count),
        )
        for index, (at, name, count) in enumerate(zip(home, names, tokens, strict=True))
    ]
    settings = replace(MigrationSettings(), excess_requests=0.0, most_replicas=most_replicas)
    task = Migration(settings, lambda name: ADAPTER_PAGES, lambda name: LOAD_SECONDS, BLOCK_TOKENS).task(
        states, asked, 0.0
    )
    if task is None:
        raise ValueError("nothing can be moved; give more replicas and requests")
    return task.problem


def _shares(count: int) -> np.ndarray:
    weights = 1 / np.arange(1, count + 1)
    return weights / weights.sum()


def measure(
    problems: Sequence[Problem], settings: MigrationSettings, planners: Sequence[str] = PLANNERS
) -> list[dict[str, Any]]:
    """Each planner's times, in ms, and regrets over the same problems."""
    bounds = [Program(problem).bound() for problem in problems]
    found = []
    for name in planners:
        times, regrets, moves = [], [], []
        for problem, bound in zip(problems, bounds, strict=True):
            began = time.thread_time()
            place = planned(problem, name, settings)
            times.append(1e3 * (time.thread_time() - began))
            moves.append(int((place != problem.home).sum()))
            if bound:
                regrets.append(problem.objective(place) / bound - 1)
        found.append({**_line(name, times, regrets, moves), "times": times})
    stay = [
        problem.objective(problem.home) / bound - 1 for problem, bound in zip(problems, bounds, strict=True) if bound
    ]
    return [_line("stay", [0.0], stay, [0]), *found]


def _line(name: str, times: list[float], regrets: list[float], moves: list[int]) -> dict[str, Any]:
    return {
        "planner": name,
        "ms": median(times),
        "most_ms": max(times),
        "regret": median(regrets) if regrets else None,
        "most_regret": max(regrets, default=None),
        "moves": median(moves),
    }


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--replicas", type=int, default=60)
    command.add_argument("--requests", type=int, default=200, help="of all replicas together")
    command.add_argument("--adapters", type=int, default=100)
    command.add_argument("--most-replicas", type=int, nargs="+", default=[2, 5, 60], metavar="K")
    command.add_argument("--seeds", type=int, default=5)
    command.add_argument("--programs-to", type=int, default=60, metavar="K", help="largest K of an integer program")
    command.add_argument("--solve-seconds", type=float, default=1.0, help="most time of an integer program")
    arguments = command.parse_args(argv)
    result = {f"K = {most}": _measure(arguments, most) for most in arguments.most_replicas}
    loop_ms = loop_us() / 1e3
    repeats = {
        f"{shape}, {line['planner']}": [each / loop_ms for each in line.pop("times", ())]
        for shape, lines in result.items()
        for line in lines
        if line["planner"] != "stay"
    }
    return conclude({"device": processor(), "load": vars(arguments), "plans": result, "repeats": repeats}, True)


def _measure(arguments: argparse.Namespace, most_replicas: int) -> list[dict[str, Any]]:
    size = arguments.replicas, arguments.requests, arguments.adapters, most_replicas
    problems = [uneven(seed, *size) for seed in range(arguments.seeds)]
    planners = [name for name in PLANNERS if most_replicas <= arguments.programs_to or name not in NEED_HIGHS]
    lines = measure(problems, MigrationSettings(solve_seconds=arguments.solve_seconds), planners)
    shape = f"{problems[0].num_replicas} replicas, about {median(len(one.home) for one in problems):.0f} requests"
    columns = "planner | ms | most: most_ms | regret %: regret * 100 | most %: most_regret * 100 | moves"
    rows_table(f"K = {most_replicas}: {shape}", columns, lines).show()
    return lines


if __name__ == "__main__":
    sys.exit(main())
