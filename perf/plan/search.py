"""The search for the cheapest candidate: the fewest replicas for each memory and policy, fewer than the best so far."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...core.config import EngineConfig
from ...core.costs.profile import Profile
from ...memory.files.error import AdapterFormatError
from ...server.cluster.router import POLICIES
from ..simulate.cluster import Cluster, Event, NoReplica
from ..simulate.controllers import Scaling
from ..simulate.records import Records
from ..simulate.results import Spread, interval, map_of
from ..simulate.serving import engine_config
from ..simulate.simulation import Simulation
from .requests import Requests, Slo, load_requests

QUANTILES = np.linspace(0, 1, 101)
LOOKS = 200
"""Checks of the queues during a trial; they stop a trial that can no longer meet the SLO."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """arena, host: bytes of a replica's page pool and of its host cache. policy: a name for `--policy`.

    replicas: their number, or the maximum if they follow the load (`Fleet.least`).
    """

    replicas: int
    arena: int
    host: int
    policy: str

    def is_within(self, other: Candidate) -> bool:
        """True if the other has the same policy and no less of anything."""
        more = other.replicas >= self.replicas and other.arena >= self.arena and other.host >= self.host
        return more and other.policy == self.policy


class AdapterSize(NamedTuple):
    """What each adapter of a rank takes."""

    rank: int
    pages: int
    num_bytes: int
    """In its pages, and as many in the host cache."""

    def __str__(self) -> str:
        return (
            f"An adapter of rank {self.rank} takes {self.num_bytes / (1 << 20):.4g} MiB in {self.pages} pages, as much "
            "in the host cache, and at most about as much on the disk."
        )


@dataclass(frozen=True)
class Fleet:
    """The common inputs of all candidates."""

    trace: Path
    profile: Profile
    slo: Slo
    targets: tuple[str, ...]
    engine: dict[str, Any] = field(default_factory=dict)
    """Fields of `EngineConfig`."""
    rank: int | None = None
    """Rank of adapters without one in the trace."""
    scale: float = 1.0
    """Factor of the trace's rate."""
    least: int | None = None
    """Least replicas, if their number follows the load; None: it is constant."""
    boot_seconds: float = 0.0
    """Seconds until a new replica serves."""

    def requests(self) -> Requests:
        return load_requests(self.trace, self.rank)

    def adapter_sizes(self) -> list[AdapterSize]:
        """Of the ranks in the trace, in rising order."""
        geometry = self.profile.geometry
        page_bytes = geometry.page_layout(self.config().block_tokens).page_bytes
        ranks = sorted(set(self.requests().ranks.values()))
        pages = {rank: -(-geometry.adapter_bytes(rank, self.targets) // page_bytes) for rank in ranks}
        return [AdapterSize(rank, count, count * page_bytes) for rank, count in pages.items()]

    def config(self, **more: Any) -> EngineConfig:
        """Engine settings of a replica; made-up prompts have no prefix to cache."""
        return engine_config({**self.engine, **more}, "--engine")


@dataclass(frozen=True, slots=True)
class Outcome:
    """attainment: share of requests within the SLO, or an upper bound if the trial was `stopped`, in which case the
    other numbers are missing. missed_ttft, missed_tpot, failed: shares of all requests. ttft, tpot: seconds at
    `QUANTILES`. replica_seconds: total time of the replicas, from the first arrival to the last completion's end.
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
    """A controller that ends a trial that can no longer meet the SLO."""

    def __init__(self, requests: Requests, slo: Slo) -> None:
        self._arrivals = [one.arrival for one in requests.items]
        self._slo = slo
        self._period = max(requests.span / LOOKS, min(slo.ttft, 1.0))
        self._next = 0.0

    def __call__(self, event: Event, cluster: Cluster) -> None:
        if event.time >= self._next:
            self._next = event.time + self._period
            cluster.tick(self._period)
            self._look(event.time, cluster)

    def _look(self, now: float, cluster: Cluster) -> None:
        """Number of waiting requests, without those that arrived lately, that have waited longer than the limit of the
        first token.
        """
        arrivals = self._arrivals
        recent = bisect_right(arrivals, now) - bisect_right(arrivals, now - self._slo.ttft)
        waiting = cluster.num_held + sum(replica.state.num_waiting for replica in cluster.replicas)
        if waiting - recent > (1 - self._slo.attainment) * len(arrivals):
            raise _Hopeless((waiting - recent) / len(arrivals))


def run_trial(fleet: Fleet, candidate: Candidate, seed: int) -> Outcome:
    requests, slo = fleet.requests().resampled(seed, fleet.scale), fleet.slo
    config = fleet.config(memory_bytes=candidate.arena, host_cache_bytes=candidate.host)
    simulation = Simulation(fleet.profile, config, candidate.replicas, targets=fleet.targets)
    for adapter in requests.ranks.items():
        simulation.add(*adapter)
    scaling = None
    if fleet.least is not None:
        scaling = Scaling(min(fleet.least, candidate.replicas), candidate.replicas, fleet.boot_seconds)
    estimates = simulation.estimates(slo.tpot if slo.tpot < math.inf else None)
    policy = POLICIES[candidate.policy](estimates, seed)
    try:
        records = simulation.run(requests.items, policy, [_Watch(requests, slo), scaling], answers=estimates.answers)
    except _Hopeless as found:
        return Outcome(1 - found.args[0], stopped=True)
    except (NoReplica, AdapterFormatError):  # some request, or some adapter, never fits into the page pool
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
        missed_ttft=float(late.sum()) / total,
        missed_tpot=float(slow.sum()) / total,
        failed=records.num_failed / total,
        replica_seconds=replica_seconds,
        ttft=_quantiles(ttft),
        tpot=_quantiles(several if len(several) else np.zeros(1)),
    )


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    return tuple(np.quantile(values, QUANTILES).tolist())


@dataclass(frozen=True)
class Tried:
    """A candidate and its outcomes by seed; not all seeds if it failed before.

    It meets the SLO if the low end of the interval of its attainment does.
    """

    candidate: Candidate
    outcomes: tuple[Outcome, ...]
    meets: bool

    @property
    def attainment(self) -> Spread:
        return Spread.of(one.attainment for one in self.outcomes)

    @property
    def stopped(self) -> bool:
        """True if only an upper bound of its attainment is known."""
        return any(one.stopped for one in self.outcomes)

    @property
    def finished(self) -> list[Outcome]:
        return [one for one in self.outcomes if not one.stopped]

    def quantile(self, name: str, share: float) -> Spread | None:
        """Quantiles of `ttft` or `tpot` in seconds; None if no trial ended."""
        index = round(share * (len(QUANTILES) - 1))
        return Spread.of(getattr(one, name)[index] for one in self.finished) if self.finished else None

    @property
    def hours(self) -> float | None:
        if not self.finished:
            return None
        return Spread.of(one.replica_seconds for one in self.finished).median / 3600

    @property
    def trouble(self) -> str:
        """The reason of the failure, in words; empty if the SLO is met."""
        if self.meets:
            return ""
        worst = min(self.outcomes, key=lambda one: one.attainment)
        if worst.stopped and worst.failed:
            return "no replica has room for some request, or for its adapter"
        if worst.stopped:
            return f"the queue grows: stopped when {1 - worst.attainment:.1%} had missed their first token's time"
        shares = {
            "TTFT missed by": worst.missed_ttft,
            "TPOT missed by": worst.missed_tpot,
            "refused or failed": worst.failed,
        }
        return ", ".join(f"{name} {share:.1%}" for name, share in shares.items() if share)


def search(
    fleet: Fleet,
    memories: Sequence[tuple[int, int]],
    policies: Sequence[str],
    most_replicas: int,
    seeds: int,
    jobs: int = 1,
    progress: Callable[[Tried], None] = lambda tried: None,
) -> list[Tried]:
    """All candidates tried. memories: (arena, host) bytes. progress: called with each when it is known.

    The search assumes that attainment rises with replicas and memory. It finds the fewest replicas by doubling and
    bisection, and does not try a failed candidate with less memory, so give the largest memory first. Later memories
    and policies are tried with as many replicas as the best one needs, and with fewer only if these meet the SLO.
    """
    found: list[Tried] = []
    with map_of(jobs) as mapped:
        best = most_replicas
        for (arena, host), policy in itertools.product(memories, policies):

            def meets(replicas: int, arena: int = arena, host: int = host, policy: str = policy) -> bool:
                candidate = Candidate(replicas, arena, host, policy)
                if any(not tried.meets and candidate.is_within(tried.candidate) for tried in found):
                    return False
                tried = _try(fleet, candidate, seeds, jobs, mapped)
                found.append(tried)
                progress(tried)
                return tried.meets

            is_first = not any(tried.meets for tried in found)
            least = fewest(meets, best, 1 if is_first else best)
            best = least or best
    return found


def fewest(meets: Callable[[int], bool], most: int, start: int = 1) -> int | None:
    """The least number, up to `most`, for which the condition holds, assuming that it holds for all larger ones; None
    if it fails for `most`.
    """
    low, high, number = 0, None, min(start, most)
    while high is None or high - low > 1:
        if meets(number):
            high = number
        elif number == most:
            return None
        else:
            low = number
        number = min(2 * number, most) if high is None else (low + high) // 2
    return high


def cheapest(tried: Iterable[Tried]) -> Tried | None:
    """The candidate with the fewest replicas that meets the SLO. Ties: the highest attainment, to a tenth of a percent,
    then the least host memory, then the largest page pool, whose memory is paid for anyway, then the first.
    """
    good = [one for one in tried if one.meets]
    if not good:
        return None

    def cost(one: Tried) -> tuple[float, ...]:
        candidate = one.candidate
        return candidate.replicas, -round(one.attainment.median, 3), candidate.host, -candidate.arena

    return min(good, key=cost)


def _try(fleet: Fleet, candidate: Candidate, seeds: int, jobs: int, mapped: Callable[..., Iterable[Any]]) -> Tried:
    """Run the seeds until the low end of the interval is known to be below the SLO. The result doesn't depend on
    `jobs`.
    """
    may_miss, _ = interval(seeds)
    outcomes: list[Outcome] = []
    missed = 0
    for first in range(0, seeds, jobs):
        for outcome in mapped(partial(run_trial, fleet, candidate), range(first, min(first + jobs, seeds))):
            outcomes.append(outcome)
            missed += outcome.attainment < fleet.slo.attainment
            if missed > may_miss:
                return Tried(candidate, tuple(outcomes), meets=False)
    return Tried(candidate, tuple(outcomes), meets=True)
