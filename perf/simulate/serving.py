"""One row of a serving study: a workload through replicas and a router, in virtual time."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from ...core.config import EngineConfig
from ...core.costs.profile import Number, Profile, Terms, load_profile
from ...core.merging.modes import mode_policy
from ...core.policies import Policies
from ...server.cluster.placement.plan import NEED_HIGHS, has_highs
from ...server.cluster.placement.preloading import burst_tolerance
from ...server.cluster.router import POLICIES, AnswerLengths, Estimates, Policy, Sampled
from ...server.cluster.router.estimates import GUESS
from ..workload import WorkloadError, WorkloadSpec
from ..workload.popularity import FromTrace
from ..workload.request import TraceRequest
from .adapters import SimAdapters
from .cluster import Cluster, Controller, Event, Happened, NoReplica, first, simulate, simulate_clients
from .controls import RankBlind, RoundRobin, mean_rank
from .engine import MODEL
from .merged_only import MergedOnly
from .migrating import Migrating
from .mode_prices import ProfilePrices
from .own_requests import CountsOwn
from .placed import HashedSlots, RankShares
from .prompts import make_prompt
from .records import Records
from .replica import Replica
from .scaling import Scaling
from .study import Flash, Limit, Router, Setup, Step, StudyError

#: Seconds between looks at the replicas, and for how many of them in a row an idle one could be given back.
LOOK, RELEASABLE = 10.0, 6


def run_serving(setup: Setup) -> dict[str, float]:
    """The row's metrics. Raises StudyError for what the setup's parts refuse, its traces included."""
    try:
        return _run(setup) if setup.limit is None else _at_limit(setup, setup.limit)
    except (WorkloadError, NoReplica) as error:
        raise StudyError(str(error)) from None


def _at_limit(setup: Setup, limit: Limit) -> dict[str, float]:
    """The first run that reaches the limit, with the rate at which it is reached."""
    below = (0.0, 0.0)
    for rate in limit.rates:
        arrivals = {**setup.workload["arrivals"], "rate": rate}
        metrics = _run(setup.model_copy(update={"workload": {**setup.workload, "arrivals": arrivals}}))
        value = metrics[limit.metric]
        if value >= limit.value:
            share = (limit.value - below[1]) / (value - below[1])
            metrics["rate_at_limit"] = below[0] + share * (rate - below[0])
            return metrics
        below = rate, value
    raise StudyError(f"limit: {limit.metric} is {below[1]:g} at {below[0]:g} requests/s; add higher rates")


def _run(setup: Setup) -> dict[str, float]:
    own = None if setup.directory is None else setup.directory / setup.profile
    profile = changed_profile(str(own) if own is not None and own.is_file() else setup.profile, setup.terms)
    if setup.tensor_parallel > 1 and profile.costs().all_reduce is None:
        raise StudyError(
            f"tensor_parallel is {setup.tensor_parallel} and profile {profile.name} has no all-reduce cost; "
            "set terms all_reduce.latency and all_reduce.per_byte"
        )
    if (setup.mode or setup.engine.get("mode_policy", "manual") != "manual") and profile.costs().merge is None:
        raise StudyError(f"nothing can be merged: profile {profile.name} has no merge cost; set terms merge.base")
    spec = WorkloadSpec.parse(setup.workload, setup.directory)
    adapters = _Adapters(profile, setup)

    def make(index: int, now: float = 0.0) -> Replica:
        return Replica(
            profile, adapters.catalogue, adapters.config, index=index, stream=setup.stream, mix=setup.mix,
            most_prompts=setup.most_prompts, most_rows=setup.most_rows, read_threads=setup.read_threads,
            keep_idle=setup.keep_idle, tells_tenants=setup.tells_tenants, degree=setup.tensor_parallel,
            assist=setup.assist, now=now, policies=_policies(setup, adapters.config, profile),
        )  # fmt: skip

    replicas = [make(index) for index in range(setup.replicas)]
    _place(setup, spec, adapters, replicas)
    source = _preload(setup, spec, adapters, replicas)
    estimates = _estimates(setup, profile, adapters.num_bytes)
    policy = _policy(setup, estimates, spec)
    wanted, scaling = setup.scaling, None
    if wanted is not None:
        scaling = Scaling(wanted.least, setup.replicas, wanted.boot_seconds, wanted.steady_seconds)
    looks: list[list[int]] = []

    def look(time: float, seen: Sequence[Replica]) -> None:
        looks.append([replica.state.num_requests for replica in seen])

    if setup.flood_keeps > 1:
        source = _thinned(source, setup.flood, setup.flood_keeps)
    if setup.flash is not None:
        source = _crowded(source, setup.flash, adapters.numbered(spec, setup.flash.adapter), adapters, spec.seed)
    requests = adapters.known(source)
    vocab_size = profile.geometry.vocab_size
    options: dict[str, Any] = {
        "prompt": (lambda request: make_prompt(request, vocab_size)) if adapters.config.prefix_cache else None,
        "staleness": setup.router.staleness, "make": make,
        "answers": estimates.answers if _learns_lengths(setup) else None,
        "controller": _controller(setup, spec, adapters, profile, scaling),
    }  # fmt: skip
    if setup.clients is None:
        records = simulate(requests, replicas, policy, watch=look, period=LOOK, **options)
    else:
        records = simulate_clients(
            requests, setup.clients, replicas, policy, think=setup.think, turns=setup.turns, seed=spec.seed, **options
        )
    loads = None
    if looks:
        loads = np.zeros((len(looks), len(looks[-1])), np.int64)  # of replicas that came later, 0 before
        for row, found in zip(loads, looks, strict=True):
            row[: len(found)] = found
    metrics = _metrics(setup, records, replicas, adapters.num_prompt_tokens, loads)
    there = setup.replicas * metrics["simulated_seconds"] if scaling is None else scaling.replica_seconds
    metrics["replica_hours"] = there / 3600
    return metrics


def _thinned(requests: Iterable[TraceRequest], tenant: str | None, keeps: int) -> Iterator[TraceRequest]:
    """Yield other tenants' requests, and of `tenant`'s only the requests for one in `keeps` of its adapters."""
    seen: dict[str | None, int] = {}
    for request in requests:
        if request.tenant != tenant or seen.setdefault(request.adapter, len(seen)) % keeps == 0:
            yield request


def _crowded(
    requests: Iterable[TraceRequest], flash: Flash, name: str, adapters: _Adapters, seed: int
) -> Iterator[TraceRequest]:
    """Yield the requests, some of them for the crowd's adapter while it lasts."""
    draw, rank = random.Random(seed).random, adapters.catalogue.rank(name)
    for request in requests:
        if 0 <= request.arrival - flash.at < flash.seconds and draw() < flash.share:
            request = request._replace(adapter=name, rank=rank)
        yield request


def _policies(setup: Setup, config: EngineConfig, profile: Profile) -> Policies:
    """Each replica has its own: they have states."""
    if setup.mode:
        mode = MergedOnly(oldest=setup.most_rows is not None)
    else:
        prices = ProfilePrices(profile.costs()) if setup.mode_prices == "profile" else None
        mode = mode_policy(config.mode_policy, prices)
    return Policies(mode=mode)


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
        self.catalogue = SimAdapters(profile.geometry.page_layout(self.config.block_tokens), tuple(setup.targets))
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
                self._add(request.adapter, request.rank)
            yield request

    def numbered(self, spec: WorkloadSpec, number: int) -> str:
        """Return the name of an adapter by its number; it is in the catalogue. StudyError where they have none."""
        count = spec.adapters.count
        if isinstance(spec.popularity, FromTrace) or (count is not None and number >= count):
            raise StudyError(f"placement and script: the workload has no adapter number {number}; name another")
        name = spec.adapters.numbered(number)
        if name not in self.catalogue:
            rank = int(spec.adapters.ranks_of(np.array([number]), count, spec.seed)[0])
            self._add(name, None if rank < 0 else rank)
        return name

    def _add(self, name: str, rank: int | None) -> None:
        if rank is None:
            raise StudyError("workload.adapters.ranks: the adapters have no rank; set it")
        self.catalogue.add(name, rank, self._size(rank))

    def num_bytes(self, name: str) -> int:
        return self._size(self.catalogue.rank(name))

    def _size(self, rank: int) -> int:
        if rank not in self._bytes:
            self._bytes[rank] = self._profile.geometry.adapter_bytes(rank, self._targets)
        return self._bytes[rank]


def _place(setup: Setup, spec: WorkloadSpec, adapters: _Adapters, replicas: Sequence[Replica]) -> None:
    if len(setup.placement) > len(replicas):
        raise StudyError(f"placement has {len(setup.placement)} replicas, the setup has {len(replicas)}; shorten it")
    for replica, numbers in zip(replicas, setup.placement, strict=False):
        if left := replica.place([adapters.numbered(spec, number) for number in numbers]):
            raise StudyError(f"placement: replica {replica.index} has no room for {left[0]}; place fewer there")


def _preload(
    setup: Setup, spec: WorkloadSpec, adapters: _Adapters, replicas: Sequence[Replica]
) -> Iterable[TraceRequest]:
    """Place adapters by the requests of the first seconds, and return the later ones."""
    wanted = setup.preload
    if wanted is None:
        return spec
    past = itertools.takewhile(lambda request: request.arrival < wanted.fit_seconds, spec)
    rates = Counter(request.adapter for request in adapters.known(past) if request.adapter is not None)
    adapters.num_prompt_tokens = 0
    pages = {name: adapters.catalogue.layout(name).num_pages for name in rates}
    room = [replica.engine.num_available_pages for replica in replicas]
    match wanted.rule:
        case "burst-tolerance":
            placed = burst_tolerance(rates, pages, room, wanted.kv_share)
        case "known":
            placed = burst_tolerance(dict.fromkeys(rates, 1.0), pages, room, wanted.kv_share)
        case "popular":
            order = [name for name, _ in rates.most_common()]
            before = list(itertools.accumulate(pages[name] for name in order))
            most = [(1 - wanted.kv_share) * count for count in room]
            placed = [[name for name, sum_ in zip(order, before, strict=True) if sum_ <= count] for count in most]
        case "none":
            placed = [[] for _ in replicas]
    for replica, names in zip(replicas, placed, strict=True):
        replica.place(names)
    return itertools.dropwhile(lambda request: request.arrival < wanted.fit_seconds, spec)


def _controller(
    setup: Setup, spec: WorkloadSpec, adapters: _Adapters, profile: Profile, scaling: Scaling | None
) -> Controller | None:
    found: list[Controller] = [] if scaling is None else [scaling]
    if setup.script:
        found.append(_Script(setup.script, spec, adapters))
    if (wanted := setup.migration) is not None:
        if wanted.planner in NEED_HIGHS and not has_highs():
            raise StudyError(f"migration.planner {wanted.planner} needs highspy: pip install 'chorus-lora[plan]'")
        found.append(Migrating(wanted.planner, wanted.parsed(), profile.costs(), adapters.catalogue))

    def control(event: Event, cluster: Cluster) -> None:
        for each in found:
            each(event, cluster)

    return control if found else None


class _Script:
    """A controller that does to replicas what a study says, when it says so."""

    def __init__(self, steps: Sequence[Step], spec: WorkloadSpec, adapters: _Adapters) -> None:
        self._steps = sorted(steps, key=lambda step: step.at)
        self._name = lambda number: adapters.numbered(spec, number)
        self._begun = False

    def __call__(self, event: Event, cluster: Cluster) -> None:
        if not self._begun:
            self._begun = True
            for at in dict.fromkeys(step.at for step in self._steps):
                cluster.tick(at - event.time)
        while event.kind is Happened.TICK and self._steps and self._steps[0].at <= event.time + 1e-9:
            self._do(self._steps.pop(0), cluster)

    def _do(self, step: Step, cluster: Cluster) -> None:
        if step.replica is None:
            cluster.boot(step.seconds)
            return
        if step.replica >= len(cluster.replicas):
            raise StudyError(f"script: there is no replica {step.replica} at {step.at:g} s; name another")
        match step.do:
            case "fail":
                cluster.fail(step.replica)
            case "drain":
                cluster.drain(step.replica)
            case "preload":
                cluster.preload(step.replica, self._name(step.adapter))


def _estimates(setup: Setup, profile: Profile, num_bytes: Callable[[str], int]) -> Estimates:
    router = setup.router
    tokens = router.mean_output_tokens or GUESS
    answers = AnswerLengths(tokens if router.prices_prefill else math.inf)
    return Estimates(profile.costs(), router.slo, answers, num_bytes, mix=setup.mix)


def _learns_lengths(setup: Setup) -> bool:
    return setup.router.mean_output_tokens is None and setup.router.prices_prefill


def _policy(setup: Setup, estimates: Estimates, spec: WorkloadSpec) -> Policy:
    router = setup.router
    if router.policy in POLICIES:
        policy = POLICIES[router.policy](estimates, spec.seed)
    else:
        policy = _baseline(router, estimates, spec.seed)
    if not router.sees_ranks:
        policy = RankBlind(policy, mean_rank(spec))
    if router.choices is not None:
        policy = Sampled(policy, router.choices, spec.seed)
    return CountsOwn(policy) if router.counts_own else policy


def _baseline(router: Router, estimates: Estimates, seed: int) -> Policy:
    match router.policy:
        case "round-robin":
            return RoundRobin()
        case "hrw-slots":
            return HashedSlots(router.slots or 1)
        case "loraserve":
            return RankShares(estimates, seed)
    return first


def _metrics(
    setup: Setup, records: Records, replicas: Sequence[Replica], num_prompt_tokens: int, loads: np.ndarray | None
) -> dict[str, float]:
    counted = records.column("arrival") >= setup.warmup
    failed = [slo for arrival, slo in records.failures if arrival >= setup.warmup]
    if failed and not counted.any():
        raise StudyError(f"all {len(failed)} requests were refused or failed; see engine and workload")
    if not counted.any():
        raise StudyError(f"warmup is {setup.warmup:g} s and no request comes after it; lower it or raise the duration")
    names = ("ttft", "tpot", "e2e", "time_per_token", "cold_share")
    samples = {name: records.column(name)[counted].astype(np.float64) for name in names}
    tokens, ends = records.column("tokens"), records.column("arrival") + records.column("e2e")
    seconds = float(ends.max() - records.column("arrival").min())
    cold = sum(replica.engine.num_cold_starts for replica in replicas)
    busy = sum(replica.executor.busy_seconds for replica in replicas)
    metrics: dict[str, Any] = {"requests": int(counted.sum()), "failed": len(failed)}
    for name, values in samples.items():
        if name == "tpot":
            values = values[tokens[counted] > 1]
        metrics["cold_share" if name == "cold_share" else f"{name}_mean"] = float(values.mean()) if len(values) else 0.0
        if name in ("ttft", "time_per_token"):
            metrics[f"{name}_p99"] = float(np.percentile(values, 99))
    metrics["ttft_p50"], metrics["ttft_most"] = float(np.median(samples["ttft"])), float(samples["ttft"].max())
    metrics["queue_per_token"] = float((records.column("queue") / tokens)[counted].mean())
    if setup.flood is not None:
        others = samples["ttft"][records.column("tenant")[counted] != setup.flood]
        if not len(others):
            raise StudyError(f"flood is {setup.flood!r} and no other tenant sends; set workload.tenants")
        metrics["others_ttft_p99"] = float(np.percentile(others, 99))
    if setup.slo is not None or setup.slo_classes:
        classes = np.append(records.column("slo")[counted], np.array(failed, object))
        times = np.append(samples["time_per_token"], np.full(len(failed), np.inf))
        metrics["slo_attainment"] = _attainment(setup, times, classes)
    metrics["tokens_per_second"] = float(tokens.sum()) / seconds
    metrics["total_tokens_per_second"] = (float(tokens.sum()) + num_prompt_tokens) / seconds
    metrics["tokens_per_busy_second"] = (float(tokens.sum()) + num_prompt_tokens) / busy
    # the sum of latencies over the sum of tokens, which is dLoRA's latency (§7.1)
    metrics["latency_per_token"] = float(samples["e2e"].sum()) / float(tokens[counted].sum())
    metrics["time_per_token_p90"] = float(np.percentile(samples["time_per_token"], 90))
    metrics["merged_share"] = sum(replica.executor.num_merged_steps for replica in replicas) / sum(
        replica.engine.stats().num_steps for replica in replicas
    )
    metrics["merges"] = sum(replica.engine.merging.num_merges for replica in replicas)
    metrics["cold_starts_per_second"] = cold / seconds
    starts = [replica.executor.cold_starts for replica in replicas]
    assisted, others = sum(each.num_assisted for each in starts), sum(each.num_streamed for each in starts)
    metrics["assisted_share"] = assisted / max(1, assisted + others)
    metrics["cold_start_regret"] = sum(each.regret_seconds for each in starts) / max(1, assisted + others)
    metrics["busy_batch"] = float((records.column("e2e") - records.column("queue")).sum(dtype=np.float64)) / busy
    metrics["simulated_seconds"] = seconds
    metrics["moved"] = records.num_moved
    metrics["requests_per_second"] = metrics["requests"] / seconds
    # of the request that ended first: what it waited for loads, its own and others'
    metrics["first_cold"] = float(samples["cold_share"][0] * samples["e2e"][0])
    if loads is not None and len(loads):
        metrics["replicas_in_use"] = float((loads > 0).sum(axis=1).mean())
        metrics["replicas_released"] = float(_long_idle(loads).mean())
    return metrics


def _attainment(setup: Setup, time_per_token: np.ndarray, classes: np.ndarray) -> float:
    """Share of requests within their class's limit, or the setup's, among all that have one. inf: a failure."""
    limits = np.full(len(classes), setup.slo or np.nan)
    for name, limit in setup.slo_classes.items():
        limits[classes == name] = limit
    has_one = ~np.isnan(limits)
    return float((time_per_token[has_one] <= limits[has_one]).mean()) if has_one.any() else 1.0


def _long_idle(loads: np.ndarray) -> np.ndarray:
    """True if each look at each replica is one of `RELEASABLE` in a row that found it idle. `[looks, replicas]`."""
    idle = loads == 0
    found = np.zeros_like(idle)
    for start in range(len(idle) - RELEASABLE + 1):
        found[start : start + RELEASABLE] |= idle[start : start + RELEASABLE].all(axis=0)
    return found
