"""Prediction of a real cluster, by policy: `python -m chorus.perf.simulate.fleet_agreement`.

For each policy a cluster of the built-in model serves the same skewed requests in real time, with migration, and the
same arrivals are simulated with the same objects for policy and planner, after the same requests before them, which
leave adapters in arenas. Nothing is taken from the runs that are compared: the costs of steps and transfers are
measured before, as by `chorus profile`, and what front, event loop and client add to them is fitted to other requests,
sent to the same cluster just before. Printed are both sides' TTFT and latency, the requests that moved, and the orders
of policies. Every answer is compared with the answer to the same request alone.

The bars: means of TTFT and latency within 15 %, the policies in the same order by latency where their real means differ
by more than 5 %, and no answer changed. Exits with 2 where other processes took more of the processors' time than a
quiet machine's do: then the times say nothing.
"""

from __future__ import annotations

import itertools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families as families

from ...core.config import EngineConfig
from ...core.costs.machine import measure_machine
from ...core.costs.profile import Profile
from ...core.engine import Engine
from ...server.cluster.placement.settings import MigrationSettings
from ...server.cluster.router import POLICIES, AnswerLengths, Estimates
from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ..cpu.rounds import FOREIGN_LIMIT, CpuSample, processor
from ..report.command import judge, parser
from ..report.table import Goal, Table
from ..serving.server_process import launched
from ..workload.request import TraceRequest
from ..workload.spec import WorkloadSpec
from .adapters import SimAdapters
from .cluster import simulate
from .loads import prompt_of
from .migrating import Migrating
from .over_http import HttpServer, fit_host
from .records import Records, Served
from .replica import Replica

MOST_ERROR, LEAST_GAP = 0.15, 0.05
MIGRATION = ("interval_seconds=2", "excess_requests=2", "hold_seconds=2")
"""The built-in model's answers take a few hundred ms; migration's own settings are for answers of seconds."""

SEATS = 16
_BATCHES, _ROUNDS = 60, 3  # of the profile
_LEARNING = 40  # requests that come before all others, with prompts of their own
_EARLIER = 1_000_000  # the first of their ids in virtual time, by which prompts are drawn
_BREAK = 1.0  # seconds between the last of them and the first of the others, in virtual time


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
        self, profile: Profile, trace: Sequence[TraceRequest], policy: str, before: Sequence[TraceRequest] = ()
    ) -> Records:
        """Serve a trace in virtual time, from second 0 on. The means of answers are learned, as in the front.

        before: requests that were served before it, of which nothing is recorded.
        """
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
        )  # fmt: skip
        return _since(records, 0.0)

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
        yield server.url, HttpServer(server.url, config)


def num_moved(url: str) -> float:
    """Requests that a front has moved, as of now."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    samples = itertools.chain.from_iterable(family.samples for family in families(text))
    return next(each.value for each in samples if each.name == "chorus_requests_moved_total")


def made(args: Any, ranks: Mapping[str, int]) -> list[TraceRequest]:
    """Poisson arrivals; an adapter's share of the requests falls with its rank, as 1/rank²."""
    spec = WorkloadSpec.parse({
        "seed": args.seed, "duration": args.seconds, "arrivals": {"process": "poisson", "rate": args.rate},
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


def run(args: Any) -> dict[str, dict[str, Any]]:
    """Both sides' means by policy, moves, and how many answers changed."""
    config = EngineConfig(
        model=BUILTIN_MODEL, adapters=BUILTIN_ADAPTERS, threads=1, max_num_seqs=SEATS, max_num_batched_tokens=256,
        memory_bytes=128 << 20,
    )  # fmt: skip
    fleet = Fleet.of(config, args.replicas)
    trace = made(args, fleet.ranks)
    found: dict[str, dict[str, Any]] = {}
    alone: list[str] = []
    for policy in args.policies:
        with cluster(config, args.replicas, policy) as (url, server):
            _, before = server.serve(trace[:_LEARNING])
            served = _Simulated(fleet, policy, before)
            quiet = CpuSample.take([os.getpid()])
            host = fit_host(
                server, fleet.profile, served, SEATS, in_process=False, adapter=trace[0].adapter, rank=trace[0].rank
            )
            moved = num_moved(url)
            real, counted = server.serve(trace, prompts="judged")
            foreign = CpuSample.take([os.getpid()]).foreign_share(quiet)
            texts, moved = server.texts, num_moved(url) - moved
            if not alone:
                server.serve(trace, one_by_one=True, prompts="judged")
                alone = server.texts
        virtual = host.simulate(served, fleet.profile, counted)
        found[policy] = {
            "real": means(real), "simulated": means(virtual), "moved": moved, "simulated_moved": served.num_moved,
            "requests": len(real), "changed": sum(one != other for one, other in zip(texts, alone, strict=True)),
            "foreign": foreign, "host": asdict(host),
        }  # fmt: skip
    return found


class _Simulated:
    """Serves traces in virtual time. num_moved: requests that moved in the last one."""

    def __init__(self, fleet: Fleet, policy: str, before: Sequence[TraceRequest] = ()) -> None:
        self._fleet, self._policy, self._before = fleet, policy, before
        self.num_moved = 0

    def __call__(self, profile: Profile, trace: Sequence[TraceRequest]) -> Records:
        records = self._fleet.simulate(profile, trace, self._policy, self._before)
        self.num_moved = records.num_moved
        return records


def main(argv: Sequence[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    command.add_argument("--replicas", type=int, default=3)
    command.add_argument("--rate", type=float, default=15.0, help="requests a second")
    command.add_argument("--seconds", type=float, default=20.0, help="of arrivals, for each policy")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument(
        "--policies", nargs="+", choices=POLICIES, default=["least-delay", "random", "first-fit"], metavar="NAME"
    )
    args = command.parse_args(argv)
    found = run(args)
    columns = ["policy", *(f"{side} {name}, ms" for name in ("TTFT", "latency") for side in ("real", "simulated"))]
    table = Table("means, real and simulated", [*columns, "moved", "simulated", "changed", "others %"])
    goals = []
    for policy, each in found.items():
        sides = each["real"], each["simulated"]
        values = (1e3 * side[name] for name in ("ttft", "e2e") for side in sides)
        table.add(policy, *values, each["moved"], each["simulated_moved"], each["changed"], 100 * each["foreign"])
        for name, label in (("ttft", "TTFT"), ("e2e", "latency")):
            off = abs(sides[1][name] / sides[0][name] - 1)
            goals.append(Goal(f"{policy}: {label} off by", off, MOST_ERROR, at_most=True))
        goals.append(Goal(f"{policy}: answers changed", each["changed"], 0, at_most=True))
    table.show()
    wrong = 0
    for one, other in itertools.combinations(found.values(), 2):
        real, virtual = (one[side]["e2e"] / other[side]["e2e"] - 1 for side in ("real", "simulated"))
        wrong += abs(real) > LEAST_GAP and real * virtual < 0
    goals.append(Goal("pairs of policies in another order", wrong, 0, at_most=True))
    code = judge({"device": processor(), "policies": found}, goals)
    others = max(each["foreign"] for each in found.values())
    if others > FOREIGN_LIMIT:
        print(f"inconclusive: others took {others:.0%} of the processors' time", file=sys.stderr)
        return 2
    return code


if __name__ == "__main__":
    sys.exit(main())
