"""Prediction of a real cluster, by policy: `python -m chorus.perf.simulate.fleet_agreement`.

In each round, for each policy a cluster of the built-in model serves the same skewed requests in real time, with
migration, and the same arrivals are simulated with the same objects for policy and planner, after the same requests
before them, which leave adapters in arenas. Nothing is taken from the runs that are compared. The costs of steps and
transfers are measured before, as by `chorus profile`; so are the processor seconds that client, front and replica need
for a request and a token, by the kernel's count, with a single replica and other requests. The simulated processes
share as many processors as this one may use.

Printed are both sides' TTFT and latency, medians over the rounds with their intervals (order statistics), the requests
that moved, and for each pair of policies by how much one's mean latency is above the other's, round by round: where the
interval holds 0 the two are called equal. Every answer is compared with the answer to the same request alone.

The bars: means of TTFT and latency within 15 %, every pair of policies that the cluster tells apart by more than 5 % in
the same order in the simulator, and no answer changed. A round in which other processes took more than 5 % of the
processors' time is left out; exits with 2 where that is so in half of them or more: then the times say nothing.
"""

from __future__ import annotations

import itertools
import operator
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from ...core.config import EngineConfig
from ...core.costs.fit import Fit
from ...server.cluster.router import POLICIES
from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ..cpu.rounds import FOREIGN_LIMIT, CpuSample, processor
from ..report.command import judge, parser, say
from ..report.table import Goal, Table
from .fleet import Fleet, cluster, counted, skewed
from .host_fit import TERMS, measure_works
from .records import Records
from .results import Spread

SIDES = "real", "simulated"
MOST_ERROR, LEAST_GAP = 0.15, 0.05
SEATS = 16
_LEARNING = 40  # requests that come before all others, with prompts of their own


def means(records: Records) -> dict[str, float]:
    return {name: float(records.column(name).mean()) for name in ("ttft", "e2e")}


def run(args: Any) -> dict[str, Any]:
    """Both sides' means by policy and round, moves, how many answers changed, and what the processes need."""
    config = EngineConfig(
        model=BUILTIN_MODEL, adapters=BUILTIN_ADAPTERS, threads=1, max_num_seqs=SEATS, max_num_batched_tokens=256,
        memory_bytes=128 << 20,
    )  # fmt: skip
    fleet = Fleet.of(config, args.replicas)
    fitted = measure_works(fleet, max(fleet.ranks))
    show_fits(fitted.fits)
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in args.policies}
    for number in range(args.rounds):
        trace = skewed(args.rate, args.seconds, args.seed + number, fleet.ranks)
        alone: list[str] = []
        for policy in args.policies:
            say(f"round {number + 1} of {args.rounds}: {policy}")
            with cluster(config, args.replicas, policy) as (url, server):
                _, before = server.serve(trace[:_LEARNING])
                moved, quiet = counted(url, "requests_moved"), CpuSample.take([os.getpid()])
                real, known = server.serve(trace, prompts="judged")
                loud = CpuSample.take([os.getpid()])
                texts, moved = server.texts, counted(url, "requests_moved") - moved
                if not alone:
                    server.serve(trace, one_by_one=True, prompts="judged")
                    alone = server.texts
            virtual, _ = fleet.simulate(known, policy, before, fitted.works)
            found[policy].append({
                "real": means(real), "simulated": means(virtual), "moved": moved, "simulated_moved": virtual.num_moved,
                "requests": len(real), "changed": sum(one != other for one, other in zip(texts, alone, strict=True)),
                "foreign": loud.foreign_share(quiet), "stolen": loud.stolen_share(quiet),
            })  # fmt: skip
    return {"works": asdict(fitted.works), "fits": {name: asdict(each) for name, each in fitted.fits.items()},
            "policies": found}  # fmt: skip


def order(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[tuple[str, str, Spread, Spread]]:
    """Each pair of policies, with the share by which the second's mean latency is above the first's, round by round:
    in the cluster and in the simulator.
    """

    def gap(one: str, other: str, side: str) -> Spread:
        pairs = zip(found[one], found[other], strict=True)
        return Spread.of(second[side]["e2e"] / first[side]["e2e"] - 1 for first, second in pairs)

    return [
        (one, other, gap(one, other, SIDES[0]), gap(one, other, SIDES[1]))
        for one, other in itertools.combinations(found, 2)
    ]


def sign(gap: Spread) -> int:
    """1 or -1 where an interval lies on one side of 0, else 0: the two are called equal."""
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
    args = command.parse_args(argv)
    result = run(args)
    found, is_quiet = quiet_rounds(result["policies"])
    code = judge({"device": processor(), **result}, [*judged_times(found), *judged_orders(found)])
    if not is_quiet:
        print("inconclusive: other processes took too much of the processors' time", file=sys.stderr)
        return 2
    return code


def quiet_rounds(found: dict[str, list[dict[str, Any]]]) -> tuple[dict[str, list[dict[str, Any]]], bool]:
    """The rounds that other processes did not disturb, and True; all rounds and False where these are not the most."""
    rounds = [*zip(*found.values(), strict=True)]
    kept = [each for each in rounds if all(one["foreign"] <= FOREIGN_LIMIT for one in each)]
    print(f"{len(kept)} of {len(rounds)} rounds were quiet")
    if 2 * len(kept) <= len(rounds):
        return found, False
    return dict(zip(found, map(list, zip(*kept, strict=True)), strict=True)), True


def show_fits(fits: Mapping[str, Fit]) -> None:
    """Print what each process needs of a processor."""
    names = [name.removeprefix("per_").replace("_", " ") for name in TERMS[1:]]
    table = Table("processor time, µs", ["of", *names, "idle %", "loads are off by, %"])
    for name, found in fits.items():
        idle, *work = (found.terms[term] for term in TERMS)
        table.add(name, *(1e6 * seconds for seconds in work), 100 * idle, 100 * found.mean_error)
    table.show()


def judged_times(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Goal]:
    """Print both sides' times and moves by policy; by how much they are off, and changed answers."""
    columns = ["policy", *(f"{side} {name}, ms" for name in ("TTFT", "latency") for side in SIDES)]
    table = Table("means: medians of the rounds", columns)
    counts = Table(
        "requests",
        ["policy", "served", "moved", "moved, simulated", "answers changed", "others had, %", "hypervisor of it, %"],
    )
    goals = []
    for policy, rounds in found.items():
        cells = []
        for name, label in (("ttft", "TTFT"), ("e2e", "latency")):
            real, virtual = ([each[side][name] for each in rounds] for side in SIDES)
            cells += [_shown(Spread.of(1e3 * value for value in values)) for values in (real, virtual)]
            off = abs(median(map(operator.truediv, virtual, real)) - 1)
            goals.append(Goal(f"{policy}: {label} off by", off, MOST_ERROR, at_most=True))
        table.add(policy, *cells)
        *numbers, changed = (
            int(sum(each[key] for each in rounds)) for key in ("requests", "moved", "simulated_moved", "changed")
        )
        most = (100 * max(each[key] for each in rounds) for key in ("foreign", "stolen"))
        counts.add(policy, *numbers, changed, *most)
        goals.append(Goal(f"{policy}: answers changed", changed, 0, at_most=True))
    table.show()
    counts.show()
    yield from goals


def judged_orders(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Goal]:
    """Print the order of each pair of policies on both sides, which one round does not tell; how many pairs are in
    another order in the simulator.
    """
    has_intervals = min(map(len, found.values())) > 1
    table = Table("the second's latency is above the first's by, %", ["first", "second", *SIDES, "order"])
    words, wrong = {1: "first is faster", -1: "second is faster", 0: "equal"}, 0
    for one, other, *gaps in order(found):
        real, virtual = map(sign, gaps) if has_intervals else (0, 0)
        agrees = real == virtual or not real or abs(gaps[0].median) <= LEAST_GAP
        wrong += not agrees
        said = words[real] if real == virtual else f"{words[real]}; simulated: {words[virtual]}"
        table.add(one, other, *(_shown(Spread(*(100 * value for value in gap.to_json()))) for gap in gaps), said)
    table.show()
    yield Goal("pairs of policies in another order", wrong, 0, at_most=True)


def _shown(spread: Spread) -> str:
    return f"{spread.median:.1f} [{spread.low:.1f}, {spread.high:.1f}]"


if __name__ == "__main__":
    sys.exit(main())
