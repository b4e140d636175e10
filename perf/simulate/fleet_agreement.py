"""Prediction of a real cluster, by policy: `python -m chorus.perf.simulate.fleet_agreement`.

For each policy a cluster of the built-in model serves the same skewed requests in real time, with migration, and the
same arrivals are simulated with the same objects for policy and planner. Step costs are what the replicas have
learned and report; what front, event loop and client add is fitted to other requests, sent to the first cluster before.
Printed are both sides' TTFT and latency, the requests that moved, and the orders of policies. Every answer is compared
with the answer to the same request alone.

The bars: means of TTFT and latency within 15 %, the policies in the same order by latency where their real means differ
by more than 5 %, and no answer changed.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families as families

from ...core.config import EngineConfig
from ...core.costs.machine import geometry_of
from ...core.costs.profile import Number, Profile, Terms, Whole
from ...core.engine import Engine
from ...core.model.config import ModelConfig
from ...server.cluster.placement.settings import MigrationSettings
from ...server.cluster.router import POLICIES, AnswerLengths, Estimates
from ...server.demo.builtin import BUILTIN_ADAPTERS, BUILTIN_MODEL
from ..cpu.rounds import processor
from ..report.command import judge, parser
from ..report.table import Goal, Table
from ..serving.server_process import launched
from ..workload.request import TraceRequest
from ..workload.spec import WorkloadSpec
from .adapters import SimAdapters
from .cluster import simulate
from .loads import prompt_of
from .migrating import Migrating
from .over_http import HostTimes, HttpServer, fit_host
from .records import Records
from .replica import Replica

MOST_ERROR, LEAST_GAP = 0.15, 0.05
MIGRATION = ("interval_seconds=2", "excess_requests=2", "hold_seconds=2")
"""The built-in model's answers take a few hundred ms; migration's own settings are for answers of seconds."""

SEATS = 16
_LEARNING = 40  # requests before the costs are read


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas as they are configured: sizes of an engine's that has ended."""

    config: EngineConfig
    ranks: dict[str, int]
    adapters: SimAdapters
    profile: Profile
    replicas: int

    @classmethod
    def of(cls, config: EngineConfig, replicas: int) -> Fleet:
        engine = Engine.from_config(config)
        try:
            page, pages = engine.executor.layout, engine.executor.num_pages
            sizes = {name: engine.store.get(name) for name in engine.store.names()}
            adapters = SimAdapters(page)
            for name, adapter in sizes.items():
                adapters.add(name, adapter.rank, adapter.num_pages * page.page_bytes)
            geometry, none = geometry_of(ModelConfig.read(config.model), engine.executor), Terms(terms={})
            profile = Profile(
                name="reported", device=processor(), model=config.model.name, source="reports of the replicas",
                kernel="sgmv", geometry=geometry, step=none, disk=none, link=none,
                memory_bytes=Whole(value=pages * page.page_bytes, source="the engine's arena"),
            )  # fmt: skip
            config = config.model_copy(update={"block_tokens": page.block_tokens, "num_pages": pages})
            ranks = {name: adapter.rank for name, adapter in sizes.items()}
            return cls(config, ranks, adapters, profile, replicas)
        finally:
            engine.close()

    def simulate(self, profile: Profile, trace: Sequence[TraceRequest], policy: str) -> Records:
        """Serve a trace in virtual time. The means of answers are learned, as in the front."""
        costs, vocab = profile.costs(), profile.geometry.vocab_size
        estimates = Estimates(costs, answers=AnswerLengths(), adapter_bytes=self._num_bytes)
        migrating = Migrating("greedy", MigrationSettings.of(MIGRATION), costs, self.adapters)
        replicas = [Replica(profile, self.adapters, self.config, index=index) for index in range(self.replicas)]
        return simulate(
            trace, replicas, POLICIES[policy](estimates, 0), prompt=lambda request: prompt_of(request, vocab),
            controller=migrating, answers=estimates.answers,
        )  # fmt: skip

    def _num_bytes(self, name: str) -> int:
        return self.adapters.manifest(name).file_size


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


def metrics(url: str) -> dict[tuple[str, str], float]:
    """A front's metrics, by name and term."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    samples = itertools.chain.from_iterable(family.samples for family in families(text))
    return {(each.name, each.labels.get("term", "")): each.value for each in samples}


def reported(profile: Profile, found: Mapping[tuple[str, str], float]) -> Profile:
    """The profile with the costs that the replicas have reported."""
    terms = {
        term: Number(value=value, source="reported") for (name, term), value in found.items()
        if name == "chorus_replica_cost_seconds"
    }  # fmt: skip
    links = {name: Terms(terms={"per_byte": terms.pop(name)}) for name in ("disk", "link")}
    return profile.model_copy(update={"step": Terms(terms=terms), **links})


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
    found, known = {}, None
    for policy in args.policies:
        with cluster(config, args.replicas, policy) as (url, server):
            server.serve(trace[:_LEARNING])
            if known is None:
                known = prepared(fleet, url, server, trace, policy)
            before = metrics(url)
            real, counted = server.serve(trace)
            time.sleep(1.0)  # a report
            after = metrics(url)
        (alone, host), served = known, _Simulated(fleet, policy)
        virtual = host.simulate(served, reported(fleet.profile, after), counted)
        moved = "chorus_requests_moved_total", ""
        found[policy] = {
            "real": means(real), "simulated": means(virtual), "moved": after[moved] - before[moved],
            "simulated_moved": served.num_moved, "requests": len(real),
            "changed": sum(one != other for one, other in zip(server.texts, alone, strict=True)),
        }  # fmt: skip
    return found


def prepared(
    fleet: Fleet, url: str, server: HttpServer, trace: Sequence[TraceRequest], policy: str
) -> tuple[list[str], HostTimes]:
    """Each request's answer alone, and what front, event loop and client add to the replicas' steps."""
    server.serve(trace, one_by_one=True)
    alone = server.texts
    return alone, fit_host(server, reported(fleet.profile, metrics(url)), _Simulated(fleet, policy), SEATS)


class _Simulated:
    """Serves traces in virtual time. num_moved: requests that moved in the last one."""

    def __init__(self, fleet: Fleet, policy: str) -> None:
        self._fleet, self._policy = fleet, policy
        self.num_moved = 0

    def __call__(self, profile: Profile, trace: Sequence[TraceRequest]) -> Records:
        records = self._fleet.simulate(profile, trace, self._policy)
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
    table = Table("means, real and simulated", [*columns, "moved", "simulated moved", "changed"])
    goals = []
    for policy, each in found.items():
        sides = each["real"], each["simulated"]
        values = (1e3 * side[name] for name in ("ttft", "e2e") for side in sides)
        table.add(policy, *values, each["moved"], each["simulated_moved"], each["changed"])
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
    return judge({"device": processor(), "policies": found}, goals)


if __name__ == "__main__":
    sys.exit(main())
