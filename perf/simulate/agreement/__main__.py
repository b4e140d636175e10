"""Prediction of a real cluster, by policy: `python -m chorus.perf.simulate.agreement`.

In each round, for each policy a cluster of the built-in model serves the same skewed requests in real time, with
migration. The same arrivals are simulated with the same objects for policy and planner, after the same earlier
requests, which leave adapters resident. The costs of steps and transfers are measured first, as by `chorus profile`.
Just before and just after each round, the CPU seconds that client, API server and replica need for a request and a
token are measured by the kernel's count, with a single replica and other requests. The simulated processes share as
many processors as this one may use. The compared runs contribute only one value: the hypervisor's part of the busy
processors' time, by which the simulated ones are slower. "At full speed" is without that.

The output is both sides' TTFT and latency, medians over the rounds with their intervals (order statistics), the
requests that moved, and for each pair of policies the difference of mean latencies, round by round: if the interval
contains 0 the two are called equal. Every answer is compared with the answer to the same request alone.

The goals: means of TTFT and latency within 15 %, every pair of policies that the cluster tells apart by more than 5 %
in the same order in the simulator, and no answer changed. A round in which other processes took more than 5 % of the
CPU time is left out; if this affects half of the rounds or more, the times are meaningless and the exit code is 2.

Tests: tests/perf/simulate/agreement/test_main.py
"""

from __future__ import annotations

import itertools
import operator
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from ....core.config import EngineConfig
from ....server.cluster.router import POLICIES
from ....server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ...bench.machine import FOREIGN_LIMIT, CpuSample, processor
from ...report.command import judge, parser, say
from ...report.table import Goal, Table
from ...workload.request import TraceRequest
from ..machine import Works
from ..records import Records
from ..results import Spread
from .fleet import Fleet, cluster, counted, skewed
from .host_fit import FittedWorks, fit_works, measure

SIDES = "real", "simulated"
MOST_ERROR, LEAST_GAP = 0.15, 0.05
SEATS = 16
_LEARNING = 40  # requests before all others, with their own prompts


def means(records: Records) -> dict[str, float]:
    return {name: float(records.column(name).mean()) for name in ("ttft", "e2e")}


@dataclass(frozen=True, slots=True)
class Run:
    """A policy's requests of a round as a cluster served them."""

    policy: str
    known: list[TraceRequest]
    before: list[TraceRequest]
    """These requests and the earlier ones, for a simulation."""
    speed: float
    seen: dict[str, Any]

    def beside(self, fleet: Fleet, works: Works) -> dict[str, Any]:
        """A cluster's measurements, next to its simulation."""
        slow, full = (
            fleet.simulate(self.known, self.policy, self.before, works, speed)[0] for speed in (self.speed, 1.0)
        )
        return {**self.seen, "simulated": means(slow), "full_speed": means(full), "simulated_moved": slow.num_moved}


def run(args: Any) -> dict[str, Any]:
    """Both sides' means by policy and round, moves, the number of changed completions, and the processes' CPU needs.

    A machine's speed drifts: a round is simulated with the measurements just before and just after it.
    """
    config = EngineConfig(
        model=BUILTIN_MODEL,
        adapters=BUILTIN_ADAPTERS,
        threads=1,
        max_num_seqs=SEATS,
        max_num_batched_tokens=256,
        memory_bytes=128 << 20,
        speculation="off",  # simulated steps verify nothing
    )
    fleet = Fleet.of(config, args.replicas)
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in args.policies}
    fits: list[FittedWorks] = []
    samples = measure(fleet, 0)
    for number in range(args.rounds):
        say(f"round {number + 1} of {args.rounds}")
        trace = skewed(args.rate, args.seconds, args.seed + number, fleet.ranks, args.set)
        runs = [*serve(config, args.replicas, args.policies, trace)]
        samples, before = measure(fleet, number + 1), samples
        fits.append(fit_works(fleet, [*before, *samples]))
        for each in runs:
            found[each.policy].append(each.beside(fleet, fits[-1].works))
    return {"costs": [asdict(each) for each in fits], "policies": found}


def serve(config: EngineConfig, replicas: int, policies: Sequence[str], trace: list[TraceRequest]) -> Iterator[Run]:
    """Serve the same requests with each policy, each on its own cluster, and one by one for their reference outputs."""
    alone: list[str] = []
    for policy in policies:
        with cluster(config, replicas, policy) as (url, server):
            _, before = server.serve(trace[:_LEARNING])
            moved, quiet = counted(url, "requests_moved"), CpuSample.take([os.getpid()])
            real, known = server.serve(trace, prompts="judged")
            loud = CpuSample.take([os.getpid()])
            moved, texts = counted(url, "requests_moved") - moved, server.texts
            if not alone:
                server.serve(trace, one_by_one=True, prompts="judged")
                alone = server.texts
        yield Run(
            policy,
            known,
            before,
            server.speed,
            {
                "real": means(real),
                "moved": moved,
                "requests": len(real),
                "spent": server.spent,
                "speed": server.speed,
                "changed": sum(one != other for one, other in zip(texts, alone, strict=True)),
                "foreign": loud.foreign_share(quiet) - loud.stolen_share(quiet),
            },
        )


def order(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, str, Spread, Spread]]:
    """Each pair of policies, with the relative difference of the second's mean latency from the first's, round by
    round: in the cluster and in the simulator.
    """

    def gap(one: str, other: str, side: str) -> Spread:
        pairs = zip(found[one], found[other], strict=True)
        return Spread.of(second[side]["e2e"] / first[side]["e2e"] - 1 for first, second in pairs)

    return [
        (one, other, gap(one, other, SIDES[0]), gap(one, other, SIDES[1]))
        for one, other in itertools.combinations(found, 2)
    ]


def sign(gap: Spread) -> int:
    """1 or -1 if an interval lies on one side of 0, else 0: the two are called equal."""
    return (gap.low > 0) - (gap.high < 0)


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--replicas", type=int, default=3)
    command.add_argument("--rate", type=float, default=25.0, help="requests a second")
    command.add_argument("--seconds", type=float, default=12.0, help="of arrivals, for each policy")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument(
        "--seed", type=int, default=0, help="of the first round; each other one has the next; below a million"
    )
    command.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=["least-delay", "random", "first-fit"], metavar="NAME"
    )
    command.add_argument(
        "--set", action="append", default=[], metavar="FIELD=VALUE", help="another field of the workload"
    )
    args = command.parse_args(argv)
    result = run(args)
    found, is_quiet = quiet_rounds(result["policies"])
    code = judge({"device": processor(), **result}, [*judged_times(found), *judged_orders(found)])
    if not is_quiet:
        print("inconclusive: other processes took too much of the processors' time", file=sys.stderr)
        return 2
    return code


def quiet_rounds(found: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, list[dict[str, Any]]], bool]:
    """The rounds that other processes did not disturb, and True; all rounds and False if the former are not the
    majority.
    """
    rounds = [*zip(*found.values(), strict=True)]
    kept = [each for each in rounds if all(one["foreign"] <= FOREIGN_LIMIT for one in each)]
    print(f"{len(kept)} of {len(rounds)} rounds were quiet")
    if 2 * len(kept) <= len(rounds):
        return found, False
    return dict(zip(found, map(list, zip(*kept, strict=True)), strict=True)), True


def judged_times(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Goal]:
    """Print both sides' times and moves by policy, the errors, and changed completions."""
    sides = {"real": "real", "simulated": "simulated", "full_speed": "at full speed"}
    columns = ["policy", *(f"{side} {name}, ms" for name in ("TTFT", "latency") for side in sides.values())]
    counts = {"requests": "served", "moved": "moved", "simulated_moved": "moved, simulated", "changed": "changed"}
    table = Table("means: medians of the rounds; requests", [*columns, *counts.values()])
    goals = []
    for policy, rounds in found.items():
        cells = []
        for name, label in (("ttft", "TTFT"), ("e2e", "latency")):
            real, virtual, full = ([each[side][name] for each in rounds] for side in sides)
            cells += [Spread.of(values).text(1e3, ".1f") for values in (real, virtual, full)]
            off = abs(median(map(operator.truediv, virtual, real)) - 1)
            goals.append(Goal(f"{policy}: {label} off by", off, MOST_ERROR, at_most=True))
        numbers = [int(sum(each[key] for each in rounds)) for key in counts]
        table.add(policy, *cells, *numbers)
        goals.append(Goal(f"{policy}: answers changed", numbers[-1], 0, at_most=True))
    table.show()
    yield from goals


def judged_orders(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Goal]:
    """Print the order of each pair of policies on both sides; return the number of pairs in another order in the
    simulator.
    """
    has_intervals = min(map(len, found.values())) > 1
    table = Table("the second's latency is above the first's by, %", ["first", "second", *SIDES, "order"])
    words, wrong = {1: "first is faster", -1: "second is faster", 0: "equal"}, 0
    for one, other, *gaps in order(found):
        real, virtual = map(sign, gaps) if has_intervals else (0, 0)
        agrees = real == virtual or not real or abs(gaps[0].median) <= LEAST_GAP
        wrong += not agrees
        said = words[real] if real == virtual else f"{words[real]}; simulated: {words[virtual]}"
        table.add(one, other, *(gap.text(100, ".1f") for gap in gaps), said)
    table.show()
    yield Goal("pairs of policies in another order", wrong, 0, at_most=True)


if __name__ == "__main__":
    sys.exit(main())
