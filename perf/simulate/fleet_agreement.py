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
import math
import operator
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, replace
from statistics import median
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ...core.config import EngineConfig
from ...core.costs.fit import fit
from ...core.costs.machine import measure_machine
from ...core.costs.profile import Profile
from ...core.engine import Engine
from ...server.cluster.placement.settings import MigrationSettings
from ...server.cluster.router import POLICIES, AnswerLengths, Estimates
from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ..cpu.rounds import FOREIGN_LIMIT, CpuSample, processor
from ..report.command import judge, parser, say
from ..report.table import Goal, Table
from ..serving.server_process import launched
from ..workload.request import TraceRequest
from ..workload.spec import WorkloadSpec
from .adapters import SimAdapters
from .cluster import simulate
from .host import Host, HostWork
from .loads import prompt_of
from .machine import Machine
from .migrating import Migrating
from .over_http import HostTimes, HttpServer
from .records import Records, Served
from .replica import Replica
from .results import Spread

SIDES = "real", "simulated"
MOST_ERROR, LEAST_GAP = 0.15, 0.05
MIGRATION = ("interval_seconds=2", "excess_requests=2", "hold_seconds=2")
"""The built-in model's answers take a few hundred ms; migration's own settings are for answers of seconds."""

SEATS = 16
_BATCHES, _ROUNDS = 60, 3  # of the profile
_LEARNING = 40  # requests that come before all others, with prompts of their own
_EARLIER = 1_000_000  # the first of their ids in virtual time, by which prompts are drawn
_BREAK = 1.0  # seconds between the last of them and the first of the others, in virtual time

_LONE, _LONE_TOKENS = 24, 4  # requests that meet no other, and tokens of each answer
_PROMPTS, _APART = (1, 32, 128), (0.05, 0.2)  # tokens of their prompts, and seconds between them
_STREAMS, _STREAM_PROMPT, _STREAM_TOKENS = (1, 2, 4, 8, 16), 32, 128
_REPEATS = 3
_REPORTED = 1.5  # seconds after which a replica's counts have come to the front
_LEAST = 1e-7  # seconds: a fit's samples are above 0


NO_WORK = HostWork()


@dataclass(frozen=True, slots=True)
class Works:
    """Processor seconds of a cluster's processes, beside the steps that a profile has.

    idle: seconds that front, client and replica need each second beside that, which nothing simulates.
    """

    client: HostWork = NO_WORK
    front: HostWork = NO_WORK
    replica: HostWork = NO_WORK
    latency: float = 0.0
    processors: float = math.inf
    idle: tuple[float, ...] = ()

    def host(self) -> Host:
        return Host(Machine(self.processors), self.front, self.client, self.latency)

    def slower(self, profile: Profile) -> Profile:
        own = self.replica
        return HostTimes(own.per_step, own.per_row, own.per_prompt, 0.0, 0.0, 0.0).slower(profile)


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas as they are configured: costs and sizes of an engine's that has ended."""

    config: EngineConfig
    ranks: dict[str, int]
    adapters: SimAdapters
    profile: Profile
    replicas: int

    @classmethod
    def of(cls, config: EngineConfig, replicas: int) -> Fleet:
        profile = measure_machine(config, batches=_BATCHES, rounds=_ROUNDS).profile
        engine = Engine.from_config(config)
        try:
            page, pages = engine.executor.layout, engine.executor.num_pages
            sizes = {name: engine.store.get(name) for name in engine.store.names()}
            adapters = SimAdapters(page)
            for name, adapter in sizes.items():
                adapters.add(name, adapter.rank, adapter.num_pages * page.page_bytes)
            config = config.model_copy(update={"block_tokens": page.block_tokens, "num_pages": pages})
            ranks = {name: adapter.rank for name, adapter in sizes.items()}
            return cls(config, ranks, adapters, profile, replicas)
        finally:
            engine.close()

    def simulate(
        self, trace: Sequence[TraceRequest], policy: str, before: Sequence[TraceRequest] = (),
        works: Works | None = None,
    ) -> tuple[Records, float]:  # fmt: skip
        """Serve a trace in virtual time, from second 0 on: its records, and the seconds that replicas computed. The
        means of answers are learned, as in the front.

        before: requests that were served before it, of which nothing is recorded. works: of the processes beside each
        other; without them a replica has a processor of its own, and no process costs anything but its steps.
        """
        works = works or Works()
        profile = works.slower(self.profile)
        costs, vocab = profile.costs(), profile.geometry.vocab_size
        estimates = Estimates(costs, answers=AnswerLengths(), adapter_bytes=self._num_bytes)
        migrating = Migrating("greedy", MigrationSettings.of(MIGRATION), costs, self.adapters)
        begin = -before[-1].arrival - _BREAK if before else 0.0
        earlier = [each._replace(id=_EARLIER + each.id, arrival=begin + each.arrival) for each in before]
        replicas = [
            Replica(profile, self.adapters, self.config, index=index, now=begin) for index in range(self.replicas)
        ]
        records = simulate(
            [*earlier, *trace], replicas, POLICIES[policy](estimates, 0),
            prompt=lambda request: prompt_of(request, vocab), controller=migrating, answers=estimates.answers,
            host=works.host(),
        )  # fmt: skip
        return _since(records, 0.0), sum(replica.executor.busy_seconds for replica in replicas)

    def _num_bytes(self, name: str) -> int:
        return self.adapters.manifest(name).file_size


def _since(records: Records, time: float) -> Records:
    """Records of the requests that came at a time or later."""
    found = Records()
    for row in zip(*map(records.column, Served._fields), strict=True):
        if row[0] >= time:
            found.add(Served(*row))
    found.failures = [failure for failure in records.failures if failure[0] >= time]
    found.num_moved = records.num_moved
    return found


@contextmanager
def cluster(config: EngineConfig, replicas: int, policy: str) -> Iterator[tuple[str, HttpServer]]:
    """A cluster of one-thread replicas with migration: its URL, and what traces are sent to. LoadError if it does not
    start.
    """
    flags = ["--model", config.model, "--served-model-name", config.model.name, "--adapters", config.adapters]
    flags += ["--max-num-seqs", config.max_num_seqs, "--max-num-batched-tokens", config.max_num_batched_tokens]
    flags += ["--memory-bytes", config.memory_bytes, "--threads", 1, "--replicas", replicas, "--policy", policy]
    flags += ["--migration", "greedy", *(f"--migration-setting={text}" for text in MIGRATION), "--no-access-log"]
    with launched([str(flag) for flag in flags], command=("cluster", "up")) as server:
        pids = {"front": server.pid, "replica": server.children("replica")[0]}
        yield server.url, HttpServer(server.url, config, pids)


def counted(url: str, name: str) -> float:
    """A counter of a cluster, as of now."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    samples = itertools.chain.from_iterable(family.samples for family in text_string_to_metric_families(text))
    return next(each.value for each in samples if each.name == f"chorus_{name}_total")


def measure_works(fleet: Fleet, adapter: str) -> Works:
    """Processor seconds of client, front and replica, by the kernel's count, of a cluster with one replica: so nothing
    depends on which processes ran beside each other. Fitted are requests that meet no other, with prompts of several
    lengths, and streams beside each other. LoadError if it does not start.

    latency: what the client waits for beside that, of requests that meet no other.
    """
    fleet, rank = replace(fleet, replicas=1), fleet.ranks[adapter]
    loads = [(_LONE, apart, prompt, _LONE_TOKENS) for prompt in _PROMPTS for apart in _APART]
    loads += [(count, 0.0, _STREAM_PROMPT, _STREAM_TOKENS) for count in _STREAMS]
    rows, spent = [], dict[str, list[float]](client=[], front=[], replica=[])
    served = list[tuple[Records, list[TraceRequest]]]()
    with cluster(fleet.config, 1, "first-fit") as (url, server):
        server.serve([TraceRequest(0, 0.0, adapter, _STREAM_PROMPT, _STREAM_TOKENS, rank)])
        for count, apart, prompt, output in loads * _REPEATS:
            trace = [TraceRequest(index, apart * index, adapter, prompt, output, rank) for index in range(count)]
            before = counted(url, "steps")
            served.append(server.serve(trace))
            time.sleep(_REPORTED)
            first = output  # the request that opens a connection, alone
            steps = counted(url, "steps") - before - first
            rows.append((server.seconds, count, count * prompt, steps, count * output))
            for name, seconds in server.spent.items():
                spent[name].append(seconds)
    processors = len(os.sched_getaffinity(0))
    client, front = (fit_work(rows, spent[name]) for name in ("client", "front"))
    works = Works(client[1], front[1], processors=processors)
    busy = [fleet.simulate(trace, "first-fit", works=works)[1] for _, trace in served]
    steps_only = [(seconds, count, 0, *rest) for seconds, count, _, *rest in rows]  # a prompt's tokens are in its step
    replica = fit_work(steps_only, [all_of - steps for all_of, steps in zip(spent["replica"], busy, strict=True)])
    works = replace(works, replica=replica[1], idle=(client[0], front[0], replica[0]))
    waits = [
        float(median(real.column("ttft")) - median(fleet.simulate(trace, "first-fit", works=works)[0].column("ttft")))
        for real, trace in served
        if len(trace) == _LONE
    ]
    return replace(works, latency=max(0.0, median(waits)))


def fit_work(rows: Sequence[Sequence[float]], seconds: Sequence[float]) -> tuple[float, HostWork]:
    """Processor seconds that a process needs each second of itself, and its work."""
    terms = "idle", *(field.name for field in fields(HostWork))
    found = fit(terms, rows, [max(_LEAST, each) for each in seconds])
    idle, *work = found.terms.values()
    return idle, HostWork(*work)


def made(args: Any, seed: int, ranks: Mapping[str, int]) -> list[TraceRequest]:
    """Poisson arrivals; an adapter's share of the requests falls with its rank, as 1/rank²."""
    spec = WorkloadSpec.parse({
        "seed": seed, "duration": args.seconds, "arrivals": {"process": "poisson", "rate": args.rate},
        "popularity": {"kind": "power_law", "exponent": 2.0},
        "lengths": {"kind": "laws", "prompt": {"law": "uniform", "low": 16, "high": 128},
                    "output": {"law": "uniform", "low": 8, "high": 96}},
        "adapters": {"count": len(ranks), "ranks": {"kind": "fixed", "rank": 8}},
    })  # fmt: skip
    names, known = sorted(ranks), {}
    for each in spec:
        known.setdefault(each.adapter, names[len(known) % len(names)])
    return [each._replace(adapter=(name := known[each.adapter]), rank=ranks[name]) for each in spec]


def means(records: Records) -> dict[str, float]:
    return {name: float(records.column(name).mean()) for name in ("ttft", "e2e")}


def run(args: Any) -> dict[str, Any]:
    """Both sides' means by policy and round, moves, how many answers changed, and what the processes need."""
    config = EngineConfig(
        model=BUILTIN_MODEL, adapters=BUILTIN_ADAPTERS, threads=1, max_num_seqs=SEATS, max_num_batched_tokens=256,
        memory_bytes=128 << 20,
    )  # fmt: skip
    fleet = Fleet.of(config, args.replicas)
    works = measure_works(fleet, max(fleet.ranks))
    found: dict[str, list[dict[str, Any]]] = {policy: [] for policy in args.policies}
    for number in range(args.rounds):
        trace = made(args, args.seed + number, fleet.ranks)
        alone: list[str] = []
        for policy in args.policies:
            say(f"round {number + 1} of {args.rounds}: {policy}")
            with cluster(config, args.replicas, policy) as (url, server):
                _, before = server.serve(trace[:_LEARNING])
                moved, quiet = counted(url, "requests_moved"), CpuSample.take([os.getpid()])
                real, known = server.serve(trace, prompts="judged")
                foreign = CpuSample.take([os.getpid()]).foreign_share(quiet)
                texts, moved = server.texts, counted(url, "requests_moved") - moved
                if not alone:
                    server.serve(trace, one_by_one=True, prompts="judged")
                    alone = server.texts
            virtual, _ = fleet.simulate(known, policy, before, works)
            found[policy].append({
                "real": means(real), "simulated": means(virtual), "moved": moved, "simulated_moved": virtual.num_moved,
                "requests": len(real), "changed": sum(one != other for one, other in zip(texts, alone, strict=True)),
                "foreign": foreign,
            })  # fmt: skip
    return {"works": asdict(works), "policies": found}


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
    command.add_argument("--rate", type=float, default=15.0, help="requests a second")
    command.add_argument("--seconds", type=float, default=20.0, help="of arrivals, for each policy")
    command.add_argument("--rounds", type=int, default=5)
    command.add_argument("--seed", type=int, default=0, help="of the first round; each other one has the next")
    command.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=["least-delay", "random", "first-fit"], metavar="NAME"
    )
    args = command.parse_args(argv)
    result = run(args)
    show_works(result["works"])
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


def show_works(works: Mapping[str, Any]) -> None:
    """Print what the processes need."""
    names = [field.name for field in fields(HostWork)]
    table = Table(
        "processor time, µs", ["of", *(name.removeprefix("per_").replace("_", " ") for name in names), "idle %"]
    )
    for name, idle in zip(("client", "front", "replica"), works["idle"], strict=True):
        table.add(name, *(1e6 * works[name][term] for term in names), 100 * idle)
    table.show()
    print(f"{works['processors']:g} processors; a request alone waits {1e3 * works['latency']:.1f} ms beside that")


def judged_times(found: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Goal]:
    """Print both sides' times and moves by policy; by how much they are off, and changed answers."""
    columns = ["policy", *(f"{side} {name}, ms" for name in ("TTFT", "latency") for side in SIDES)]
    table = Table("means: medians of the rounds", columns)
    counts = Table("requests", ["policy", "served", "moved", "moved, simulated", "answers changed", "others had, %"])
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
        counts.add(policy, *numbers, changed, 100 * max(each["foreign"] for each in rounds))
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
