"""A cluster like the built-in model's: real processes, and the same replicas in virtual time.

Tests: tests/perf/simulate/agreement/
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ....core.config import EngineConfig
from ....core.costs.machine import measure_machine
from ....core.costs.profile import Profile
from ....core.engine import Engine
from ....server.cluster.placement.settings import MigrationSettings
from ....server.cluster.router import POLICIES
from ...serving.server_process import launched
from ...workload.request import TraceRequest
from ...workload.spec import WorkloadSpec
from ..adapters import SimAdapters
from ..controllers import Migrating
from ..machine import Host, Works
from ..records import Records, Served
from ..simulation import Simulation
from .over_http import HttpServer

MIGRATION = ("interval_seconds=2", "excess_requests=2", "hold_seconds=2")
"""The built-in model's completions take a few hundred ms; migration's own settings assume seconds."""

_BATCHES, _ROUNDS = 60, 5  # of the profile
_EARLIER = 1_000_000  # the first id in virtual time of earlier requests; ids determine prompts
_BREAK = 1.0  # seconds between the last of them and the first of the others, in virtual time


@dataclass(frozen=True, slots=True)
class Fleet:
    """Replicas as configured, with one thread each: costs, in CPU seconds, and sizes of an engine that has ended."""

    config: EngineConfig
    ranks: dict[str, int]
    adapters: SimAdapters
    profile: Profile
    replicas: int

    @classmethod
    def of(cls, config: EngineConfig, replicas: int) -> Fleet:
        profile = measure_machine(config, batches=_BATCHES, rounds=_ROUNDS, clock=time.thread_time).profile
        engine = Engine.from_config(config)
        try:
            page, pages = engine.executor.layout, engine.executor.num_pages
            sizes = {name: engine.store.get(name) for name in engine.store.names()}
            adapters = SimAdapters(profile.geometry, page.block_tokens)
            for name, adapter in sizes.items():
                adapters.add(name, adapter.rank, adapter.num_pages * page.page_bytes)
            config = config.model_copy(update={"block_tokens": page.block_tokens, "num_pages": pages})
            ranks = {name: adapter.rank for name, adapter in sizes.items()}
            return cls(config, ranks, adapters, profile, replicas)
        finally:
            engine.close()

    def simulate(
        self,
        trace: Sequence[TraceRequest],
        policy: str,
        before: Sequence[TraceRequest] = (),
        works: Works | None = None,
        speed: float = 1.0,
    ) -> tuple[Records, float]:
        """Serve a trace in virtual time, from second 0 on: its records, and the seconds that replicas computed. Mean
        completion lengths are learned, as in the API server.

        before: requests that were served earlier and are not recorded. works: CPU costs of the processes that share the
        machine; without them a replica has its own processor, and only its steps cost anything. speed: of processors,
        see `Machine`.
        """
        works = works or Works()
        begin = -before[-1].arrival - _BREAK if before else 0.0
        earlier = [each._replace(id=_EARLIER + each.id, arrival=begin + each.arrival) for each in before]
        simulation = Simulation(
            works.slower(self.profile), self.config, self.replicas, adapters=self.adapters, now=begin
        )
        estimates = simulation.estimates()
        migrating = Migrating("greedy", MigrationSettings.of(MIGRATION), estimates.costs, self.adapters)
        records = simulation.run(
            [*earlier, *trace],
            POLICIES[policy](estimates, 0),
            [migrating],
            answers=estimates.answers,
            host=Host(works, speed),
        )
        return _since(records, 0.0), sum(replica.executor.busy_seconds for replica in simulation.replicas)


def _since(records: Records, time: float) -> Records:
    """Records of the requests that came at a time or later."""
    found = Records()
    for row in zip(*map(records.column, Served._fields), strict=True):
        if row[0] >= time:
            found.add(Served(*row))
    found.failures = [failure for failure in records.failures if failure >= time]
    found.num_moved = records.num_moved
    return found


@contextmanager
def cluster(config: EngineConfig, replicas: int, policy: str) -> Iterator[tuple[str, HttpServer]]:
    """A cluster of one-thread replicas with migration: its URL, and the target for traces. Raises LoadError if it does
    not start.
    """
    flags = ["--model", config.model, "--served-model-name", config.model.name, "--adapters", config.adapters]
    flags += ["--max-num-seqs", config.max_num_seqs, "--max-num-batched-tokens", config.max_num_batched_tokens]
    flags += ["--memory-bytes", config.memory_bytes, "--threads", 1, "--speculation", config.speculation]
    flags += ["--replicas", replicas, "--policy", policy]
    flags += ["--migration", "greedy", *(f"--migration-setting={text}" for text in MIGRATION), "--no-access-log"]
    with launched([str(flag) for flag in flags], command=("cluster", "up")) as server:
        pids = {"front": [server.pid], "replica": server.children("replica")}
        yield server.url, HttpServer(server.url, config, pids)


def counted(url: str, name: str) -> float:
    """The current value of a cluster's counter."""
    text = httpx.get(f"{url}/metrics", trust_env=False).text
    samples = itertools.chain.from_iterable(family.samples for family in text_string_to_metric_families(text))
    return next(each.value for each in samples if each.name == f"chorus_{name}_total")


def skewed(
    rate: float, seconds: float, seed: int, ranks: Mapping[str, int], settings: Sequence[str] = ()
) -> list[TraceRequest]:
    """Poisson arrivals; an adapter's share of the requests falls with its rank, as 1/rank².

    settings: FIELD=VALUE, other fields of the workload. Adapters of a trace are mapped to served adapters in rotation.
    """
    spec = WorkloadSpec.parse(
        {
            "seed": seed,
            "duration": seconds,
            "arrivals": {"process": "poisson", "rate": rate},
            "popularity": {"kind": "power_law", "exponent": 2.0},
            "lengths": {
                "kind": "laws",
                "prompt": {"law": "uniform", "low": 16, "high": 128},
                "output": {"law": "uniform", "low": 8, "high": 96},
            },
            "adapters": {"count": len(ranks), "ranks": {"kind": "fixed", "rank": 8}},
        },
        settings=settings,
    )
    names, known = sorted(ranks), dict[str | None, str]()
    for each in spec:
        known.setdefault(each.adapter, names[len(known) % len(names)])
    return [each._replace(adapter=(name := known[each.adapter]), rank=ranks[name]) for each in spec]
