"""One row of a serving study: a workload with replicas and a router, in virtual time."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from ...core.config import EngineConfig
from ...core.costs.profile import Number, Profile, Terms, load_profile
from ...core.merging.modes import mode_policy
from ...core.policies import Policies
from ...server.cluster.placement.plan import NEED_HIGHS, has_highs
from ...server.cluster.placement.preloading import burst_tolerance
from ...server.cluster.router import POLICIES, AnswerLengths, Estimates, Policy, Sampled
from ...server.cluster.router.estimates import GUESS
from ..workload import WorkloadSpec
from ..workload.fields import wrong_fields
from ..workload.popularity import FromTrace
from ..workload.request import TraceRequest
from .baselines import CountsOwn, HashedSlots, RankShares, RoundRobin, mean_rank, rank_blind
from .cluster import first
from .controllers import Migrating, Scaling
from .engine import MODEL
from .merging import MergedOnly, ProfilePrices
from .metrics import LOOK, Outcome, metrics_of
from .replica import Replica
from .setup import Flash, Limit, Preload, Router, Setup, StudyError
from .simulation import Simulation


def run_serving(setup: Setup) -> dict[str, float]:
    """The row's metrics. Raises WorkloadError for invalid parts of the setup, including traces."""
    return _run(setup) if setup.limit is None else _at_limit(setup, setup.limit)


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
    if (setup.mode or setup.engine.get("mode_policy", "manual") != "manual") and profile.costs().merge is None:
        raise StudyError(f"nothing can be merged: profile {profile.name} has no merge cost; set terms merge.base")
    spec, config = WorkloadSpec.parse(setup.workload, setup.directory), engine_config(setup.engine)
    told_rank = None if setup.router.sees_ranks else mean_rank(spec)
    simulation = Simulation(
        profile,
        config,
        setup.replicas,
        targets=setup.targets,
        stream=setup.stream,
        mix=setup.mix,
        most_prompts=setup.most_prompts,
        most_rows=setup.most_rows,
        keep_idle=setup.keep_idle,
        tells_tenants=setup.tells_tenants,
        told_rank=told_rank,
        assist=setup.assist,
        policies=lambda: _policies(setup, config, profile),
    )
    source: Iterable[TraceRequest] = spec
    _place(setup, spec, simulation)
    if setup.preload is not None:
        source = _preload(setup.preload, spec, simulation)
    router = setup.router
    learns = router.mean_output_tokens is None and router.prices_prefill
    answers = AnswerLengths((router.mean_output_tokens or GUESS) if router.prices_prefill else math.inf)
    estimates = simulation.estimates(router.slo, answers, mix=setup.mix)
    wanted, scaling = setup.scaling, None
    if wanted is not None:
        scaling = Scaling(wanted.least, setup.replicas, wanted.boot_seconds, wanted.steady_seconds)
    if setup.flood_keeps > 1:
        source = _thinned(source, setup.flood, setup.flood_keeps)
    if setup.flash is not None:
        source = _crowded(source, setup.flash, _numbered(setup.flash.adapter, spec, simulation), simulation, spec.seed)
    looks: list[list[int]] = []

    def look(time: float, seen: Sequence[Replica]) -> None:
        looks.append([replica.state.num_requests for replica in seen])

    records = simulation.run(
        source,
        _policy(router, estimates, spec.seed, told_rank),
        [scaling, _migrating(setup, simulation)],
        clients=setup.clients,
        watch=look,
        period=LOOK,
        staleness=router.staleness,
        answers=answers if learns else None,
    )
    outcome = Outcome(
        setup,
        records,
        replicas=simulation.replicas,
        num_prompt_tokens=simulation.num_prompt_tokens,
        loads=looks,
        replica_seconds=scaling.replica_seconds if scaling else None,
    )
    if not outcome.counted.any():
        if outcome.failed:
            raise StudyError(f"all {outcome.failed} requests were refused or failed; see engine and workload")
        raise StudyError(f"warmup is {setup.warmup:g} s and no request comes after it; lower it or raise the duration")
    others = outcome.others_ttft()
    if others is not None and not len(others):
        raise StudyError(f"flood is {setup.flood!r} and no other tenant sends; set workload.tenants")
    return metrics_of(outcome)


def engine_config(fields: Mapping[str, Any], origin: str = "engine") -> EngineConfig:
    """The configuration of a simulated replica. Raises StudyError, which begins with `origin`."""
    fields = {"prefix_cache": False, "max_waiting": None, **fields}
    try:
        config = EngineConfig(model=MODEL, **fields)
    except ValidationError as error:
        raise StudyError(wrong_fields(origin, fields, error).partition("\n")[0]) from None
    if config.speculates:
        raise StudyError(f"{origin}.speculation is {config.speculation!r}, but simulated steps verify nothing; omit it")
    return config


def _thinned(requests: Iterable[TraceRequest], tenant: str | None, keeps: int) -> Iterator[TraceRequest]:
    """Yield other tenants' requests, and those of `tenant`'s that use one in `keeps` of its adapters."""
    seen: dict[str | None, int] = {}
    for request in requests:
        if request.tenant != tenant or seen.setdefault(request.adapter, len(seen)) % keeps == 0:
            yield request


def _crowded(
    requests: Iterable[TraceRequest], flash: Flash, name: str, simulation: Simulation, seed: int
) -> Iterator[TraceRequest]:
    """Yield the requests, some of them redirected to the flash crowd's adapter while it lasts."""
    draw, rank = random.Random(seed).random, simulation.adapters.rank(name)
    for request in requests:
        if 0 <= request.arrival - flash.at < flash.seconds and draw() < flash.share:
            request = request._replace(adapter=name, rank=rank)
        yield request


def _policies(setup: Setup, config: EngineConfig, profile: Profile) -> Policies:
    if setup.mode:
        return Policies(mode=MergedOnly(oldest=setup.most_rows is not None))
    prices = ProfilePrices(profile.costs()) if setup.mode_prices == "profile" else None
    return Policies(mode=mode_policy(config.mode_policy, prices, profile.costs().step.expert_share))


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


def _numbered(number: int, spec: WorkloadSpec, simulation: Simulation) -> str:
    """Return the name of an adapter by its number; it is in the catalogue. Raises StudyError if there are no
    numbers.
    """
    count = spec.adapters.count
    if isinstance(spec.popularity, FromTrace) or (count is not None and number >= count):
        raise StudyError(f"placement and flash: the workload has no adapter number {number}; name another")
    name = spec.adapters.numbered(number)
    if name not in simulation.adapters:
        simulation.add(name, spec.adapters.rank_of(number, spec.seed))
    return name


def _place(setup: Setup, spec: WorkloadSpec, simulation: Simulation) -> None:
    replicas = simulation.replicas
    if len(setup.placement) > len(replicas):
        raise StudyError(f"placement has {len(setup.placement)} replicas, the setup has {len(replicas)}; shorten it")
    for replica, numbers in zip(replicas, setup.placement, strict=False):
        if left := replica.place([_numbered(number, spec, simulation) for number in numbers]):
            raise StudyError(f"placement: replica {replica.index} has no room for {left[0]}; place fewer there")


def _preload(wanted: Preload, spec: WorkloadSpec, simulation: Simulation) -> Iterable[TraceRequest]:
    """Place adapters by the requests of the first seconds, and return the later ones."""
    past = itertools.takewhile(lambda request: request.arrival < wanted.fit_seconds, spec)
    rates = Counter(request.adapter for request in simulation.known(past) if request.adapter is not None)
    simulation.num_prompt_tokens = 0
    pages = {name: simulation.adapters.layout(name).num_pages for name in rates}
    room = [replica.engine.num_available_pages for replica in simulation.replicas]
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
            placed = [[] for _ in room]
    for replica, names in zip(simulation.replicas, placed, strict=True):
        replica.place(names)
    return itertools.dropwhile(lambda request: request.arrival < wanted.fit_seconds, spec)


def _migrating(setup: Setup, simulation: Simulation) -> Migrating | None:
    wanted = setup.migration
    if wanted is None:
        return None
    if wanted.planner in NEED_HIGHS and not has_highs():
        raise StudyError(f"migration.planner {wanted.planner} needs highspy: pip install 'chorus-lora[plan]'")
    return Migrating(wanted.planner, wanted.parsed(), simulation.profile.costs(), simulation.adapters)


def _policy(router: Router, estimates: Estimates, seed: int, told_rank: int | None) -> Policy:
    match router.policy:
        case "first":
            policy = first
        case "round-robin":
            policy = RoundRobin()
        case "hrw-slots":
            policy = HashedSlots(router.slots or 1)
        case "loraserve":
            policy = RankShares(estimates, seed)
        case name:
            policy = POLICIES[name](estimates, seed)
    if told_rank is not None:
        policy = rank_blind(policy, told_rank)
    if router.choices is not None:
        policy = Sampled(policy, router.choices, seed)
    return CountsOwn(policy) if router.counts_own else policy
