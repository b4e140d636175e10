"""Trials: the requests of one seed through a candidate's replicas, in virtual time."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ...core.config import EngineConfig
from ...core.costs.profile import Profile
from ...memory.files.error import AdapterFormatError
from ...server.cluster.router import POLICIES, Estimates
from ..simulate.adapters import SimAdapters
from ..simulate.cluster import Cluster, Controller, Event, NoReplica, simulate
from ..simulate.engine import MODEL
from ..simulate.records import Records
from ..simulate.replica import Replica
from ..simulate.scaling import Scaling
from .requests import Requests, load_requests
from .slo import Slo

QUANTILES = np.linspace(0, 1, 101)
LOOKS = 200
"""Looks at the queues in a trial, which stop one that can't meet the SLO any more."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """arena, host: bytes of a replica's arena and of its host cache. policy: a name that `--policy` takes.

    replicas: how many there are, or at most where they follow the load (`Fleet.least`).
    """

    replicas: int
    arena: int
    host: int
    policy: str

    def is_within(self, other: Candidate) -> bool:
        """True if the other has the same policy and no less of anything."""
        more = other.replicas >= self.replicas and other.arena >= self.arena and other.host >= self.host
        return more and other.policy == self.policy


@dataclass(frozen=True)
class Fleet:
    """What all candidates share. rank: of adapters of which the trace tells none. engine: fields of `EngineConfig`.

    scale: multiplies the trace's rate. least: replicas at least, where their number follows the load; None: it stays.
    boot_seconds: until one more serves.
    """

    trace: Path
    profile: Profile
    slo: Slo
    targets: tuple[str, ...]
    engine: dict[str, Any] = field(default_factory=dict)
    rank: int | None = None
    scale: float = 1.0
    least: int | None = None
    boot_seconds: float = 0.0

    def requests(self) -> Requests:
        return load_requests(self.trace, self.rank)

    def config(self, **more: Any) -> EngineConfig:
        """Of a replica; made-up prompts have no prefix to cache."""
        return EngineConfig(model=MODEL, prefix_cache=False, max_waiting=None, **{**self.engine, **more})


@dataclass(frozen=True, slots=True)
class Outcome:
    """attainment: share of requests within the SLO, or the most that it could be where the trial was `stopped`; the
    other numbers are missing then. missed_ttft, missed_tpot, failed: shares of all requests. ttft, tpot: seconds at
    `QUANTILES`. replica_seconds: that replicas have been there, from the first arrival to the last answer's end.
    """

    attainment: float
    stopped: bool = False
    missed_ttft: float = 0.0
    missed_tpot: float = 0.0
    failed: float = 0.0
    replica_seconds: float = 0.0
    ttft: tuple[float, ...] = ()
    tpot: tuple[float, ...] = ()


class _Hopeless(Exception):
    """So many requests have missed the SLO that the others don't matter. args: their share."""


class _Watch:
    """A controller that ends a trial that can't meet the SLO any more, and tells another of what happens."""

    def __init__(self, requests: Requests, slo: Slo, other: Controller | None) -> None:
        self._arrivals = [one.arrival for one in requests.items]
        self._slo, self._other = slo, other
        self._period = max(requests.span / LOOKS, min(slo.ttft, 1.0))
        self._next = 0.0

    def __call__(self, event: Event, cluster: Cluster) -> None:
        if event.time >= self._next:
            self._next = event.time + self._period
            cluster.tick(self._period)
            self._look(event.time, cluster)
        if self._other is not None:
            self._other(event, cluster)

    def _look(self, now: float, cluster: Cluster) -> None:
        """Waiting requests, but for as many as came of late, have waited for longer than their first token may take."""
        arrivals = self._arrivals
        recent = bisect_right(arrivals, now) - bisect_right(arrivals, now - self._slo.ttft)
        waiting = cluster.num_held + sum(replica.state.num_waiting for replica in cluster.replicas)
        if waiting - recent > (1 - self._slo.attainment) * len(arrivals):
            raise _Hopeless((waiting - recent) / len(arrivals))


def run_trial(fleet: Fleet, candidate: Candidate, seed: int) -> Outcome:
    requests, slo = fleet.requests().resampled(seed, fleet.scale), fleet.slo
    config = fleet.config(memory_bytes=candidate.arena, host_cache_bytes=candidate.host)
    geometry = fleet.profile.geometry
    adapters = SimAdapters(geometry.page_layout(config.block_tokens), fleet.targets)
    for name, rank in requests.ranks.items():
        adapters.add(name, rank, geometry.adapter_bytes(rank, fleet.targets))

    def make(index: int, now: float = 0.0) -> Replica:
        return Replica(fleet.profile, adapters, config, index=index, now=now)

    replicas = [make(index) for index in range(candidate.replicas)]
    scaling = None
    if fleet.least is not None:
        scaling = Scaling(min(fleet.least, candidate.replicas), candidate.replicas, fleet.boot_seconds)
    estimates = Estimates(
        fleet.profile.costs(), slo.tpot if slo.tpot < math.inf else None,
        adapter_bytes=lambda name: geometry.adapter_bytes(requests.ranks[name], fleet.targets),
    )  # fmt: skip
    policy, watch = POLICIES[candidate.policy](estimates, seed), _Watch(requests, slo, scaling)
    try:
        records = simulate(requests.items, replicas, policy, controller=watch, make=make, answers=estimates.answers)
    except _Hopeless as found:
        return Outcome(1 - found.args[0], stopped=True)
    except (NoReplica, AdapterFormatError):  # an arena that some request, or some adapter, never has room in
        return Outcome(0.0, failed=1.0, stopped=True)
    if not len(records):
        return Outcome(0.0, failed=1.0, stopped=True)
    seconds = float((records.column("arrival") + records.column("e2e")).max())
    return _outcome(records, slo, candidate.replicas * seconds if scaling is None else scaling.replica_seconds)


def _outcome(records: Records, slo: Slo, replica_seconds: float) -> Outcome:
    total = len(records) + records.num_failed
    ttft, tpot = records.column("ttft"), records.column("tpot")
    late, slow = ttft > slo.ttft, tpot > slo.tpot
    several = tpot[records.column("tokens") > 1]
    return Outcome(
        attainment=float((~late & ~slow).sum()) / total,
        missed_ttft=float(late.sum()) / total, missed_tpot=float(slow.sum()) / total,
        failed=records.num_failed / total, replica_seconds=replica_seconds,
        ttft=_quantiles(ttft), tpot=_quantiles(several if len(several) else np.zeros(1)),
    )  # fmt: skip


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.quantile(values, QUANTILES).tolist())
