"""One row of a serving study: a workload through replicas and a router, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic import ValidationError

from ...core.config import EngineConfig
from ...core.costs.profile import Number, Profile, Terms, load_profile
from ...server.cluster.router import Consolidate, FirstFit, MostIdle, PendingTime, Policy, Random, RankAware
from ..workload import WorkloadError, WorkloadSpec
from ..workload.request import TraceRequest
from .adapters import SimAdapters
from .cluster import first, simulate, simulate_clients
from .controls import RankBlind, mean_rank
from .engine import MODEL
from .records import Records
from .replica import Replica
from .study import Setup, StudyError

#: Seconds between looks at the replicas, and for how many of them in a row an idle one could be given back.
LOOK, RELEASABLE = 10.0, 6


@dataclass
class Outcome:
    """A row's metrics, and what the plots draw: values per request, and requests per replica over time."""

    metrics: dict[str, float]
    samples: dict[str, np.ndarray] = field(default_factory=dict)
    loads: np.ndarray | None = None  # [looks, replicas]


def run_serving(setup: Setup) -> Outcome:
    """Raises StudyError for what the setup's parts refuse."""
    profile = changed_profile(setup.profile, setup.terms)
    try:
        spec = WorkloadSpec.parse(setup.workload)
    except WorkloadError as error:
        raise StudyError(str(error)) from None
    adapters = _Adapters(profile, setup)
    replicas = [
        Replica(
            profile, adapters.catalogue, adapters.config, index=index, stream=setup.stream, mix=setup.mix,
            most_prompts=setup.most_prompts, read_threads=setup.read_threads, keep_idle=setup.keep_idle,
        )
        for index in range(setup.replicas)
    ]  # fmt: skip
    policy = _policy(setup, profile, adapters.num_bytes, spec)
    looks: list[list[int]] = []

    def look(time: float, seen: Sequence[Replica]) -> None:
        looks.append([replica.state.num_requests for replica in seen])

    requests = adapters.known(spec)
    if setup.clients is None:
        records = simulate(requests, replicas, policy, watch=look, period=LOOK)
    else:
        records = simulate_clients(
            requests, setup.clients, replicas, policy, think=setup.think, turns=setup.turns, seed=spec.seed
        )
    loads = np.array(looks) if looks else None
    return _outcome(setup, records, replicas, adapters.num_prompt_tokens, loads)


def changed_profile(name: str, terms: Mapping[str, float]) -> Profile:
    """A profile with other values for some terms of its cost models. Raises StudyError and ProfileError."""
    profile = load_profile(name)
    parts = {part for part, each in Profile.model_fields.items() if each.annotation in (Terms, Terms | None)}
    for dotted, value in terms.items():
        part, _, term = dotted.partition(".")
        if part not in parts or not term:
            raise StudyError(
                f"terms.{dotted}: no such cost model in profile {profile.name}; write it like link.per_byte"
            )
        before = getattr(profile, part)
        changed = {**(before.terms if before else {}), term: Number(value=value, source="set by the study")}
        profile = profile.model_copy(update={part: Terms(terms=changed)})
    profile.costs()
    return profile


class _Adapters:
    """The catalogue, to which a workload's adapters are added as they come."""

    def __init__(self, profile: Profile, setup: Setup) -> None:
        try:
            self.config = EngineConfig(model=MODEL, **{"prefix_cache": False, "max_waiting": None, **setup.engine})
        except ValidationError as error:
            first_error = error.errors(include_url=False)[0]
            place = ".".join(map(str, first_error["loc"]))
            raise StudyError(f"engine.{place} is {first_error['input']!r}: {first_error['msg']}") from None
        self.catalogue = SimAdapters(profile.geometry.page_layout(self.config.block_tokens))
        self.num_prompt_tokens = 0
        self._profile = profile
        self._targets = tuple(setup.targets)
        self._bytes: dict[int, int] = {}

    def known(self, requests: Iterable[TraceRequest]) -> Iterator[TraceRequest]:
        """The same requests; their adapters are in the catalogue."""
        catalogue = self.catalogue
        for request in requests:
            self.num_prompt_tokens += request.prompt_tokens
            if request.adapter is not None and request.adapter not in catalogue:
                if request.rank is None:
                    raise StudyError("workload.adapters.ranks: the adapters have no rank; set it")
                catalogue.add(request.adapter, request.rank, self._size(request.rank))
            yield request

    def num_bytes(self, name: str) -> int:
        return self._size(self.catalogue.rank(name))

    def _size(self, rank: int) -> int:
        if rank not in self._bytes:
            self._bytes[rank] = self._profile.geometry.adapter_bytes(rank, self._targets)
        return self._bytes[rank]


def _policy(setup: Setup, profile: Profile, num_bytes: Callable[[str], int], spec: WorkloadSpec) -> Policy:
    router, costs = setup.router, profile.costs()
    tokens = router.mean_output_tokens or 0.0
    shared_by = tokens if router.prices_prefill else math.inf
    makers: dict[str, Callable[[], Policy]] = {
        "first": lambda: first, "most_idle": MostIdle, "first_fit": FirstFit, "consolidate": Consolidate,
        "random": lambda: Random(spec.seed),
        "rank_aware": lambda: RankAware(costs, router.slo or 0.0, shared_by, mix=setup.mix),
        "pending_time": lambda: PendingTime(costs, tokens, num_bytes),
    }  # fmt: skip
    policy = makers[router.policy]()
    return policy if router.sees_ranks else RankBlind(policy, mean_rank(spec))


def _outcome(
    setup: Setup, records: Records, replicas: Sequence[Replica], num_prompt_tokens: int, loads: np.ndarray | None
) -> Outcome:
    counted = records.column("arrival") >= setup.warmup
    if not counted.any():
        raise StudyError(f"warmup is {setup.warmup:g} s and no request comes after it; lower it or raise the duration")
    names = ("ttft", "tpot", "e2e", "time_per_token", "cold_share")
    samples = {name: records.column(name)[counted].astype(np.float64) for name in names}
    tokens, ends = records.column("tokens"), records.column("arrival") + records.column("e2e")
    seconds = float(ends.max() - records.column("arrival").min())
    cold = sum(replica.engine.num_cold_starts for replica in replicas)
    busy = sum(replica.executor.busy_seconds for replica in replicas)
    metrics: dict[str, Any] = {"requests": int(counted.sum()), "failed": records.num_failed}
    for name, values in samples.items():
        if name == "tpot":
            values = values[tokens[counted] > 1]
        metrics["cold_share" if name == "cold_share" else f"{name}_mean"] = float(values.mean()) if len(values) else 0.0
        if name in ("ttft", "time_per_token"):
            metrics[f"{name}_p99"] = float(np.percentile(values, 99))
    if setup.slo is not None:
        metrics["slo_attainment"] = float((samples["time_per_token"] <= setup.slo).mean())
    metrics["tokens_per_second"] = float(tokens.sum()) / seconds
    metrics["total_tokens_per_second"] = (float(tokens.sum()) + num_prompt_tokens) / seconds
    metrics["tokens_per_busy_second"] = (float(tokens.sum()) + num_prompt_tokens) / busy
    metrics["cold_starts_per_second"] = cold / seconds
    metrics["busy_batch"] = float((records.column("e2e") - records.column("queue")).sum(dtype=np.float64)) / busy
    metrics["simulated_seconds"] = seconds
    if loads is not None and len(loads):
        metrics["replicas_in_use"] = float((loads > 0).sum(axis=1).mean())
        metrics["replicas_released"] = float(_long_idle(loads).mean())
    return Outcome(metrics, samples, loads)


def _long_idle(loads: np.ndarray) -> np.ndarray:
    """True if each look at each replica is one of `RELEASABLE` in a row that found it idle. `[looks, replicas]`."""
    idle = loads == 0
    found = np.zeros_like(idle)
    for start in range(len(idle) - RELEASABLE + 1):
        found[start : start + RELEASABLE] |= idle[start : start + RELEASABLE].all(axis=0)
    return found
