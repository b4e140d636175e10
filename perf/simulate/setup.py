"""Setups: what one simulation of a study or a figure is made of, as fields of its file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from ...memory.pages.layout import MODULES
from ...server.cluster.placement.settings import MigrationSettings
from ...server.cluster.router import POLICIES
from ...server.cluster.router.scale import STEADY_SECONDS
from ..workload.fields import Strict, WorkloadError

#: Policies that only studies have.
BASELINES = ("first", "round-robin", "hrw-slots", "loraserve")


class StudyError(WorkloadError):
    """A study that can't be run; the text names the file, the field and the mend."""


class Router(Strict):
    """The policy that routes requests: "first", a name of `POLICIES` with _ or - between its words, or a baseline:
    "round-robin", in turn the replicas that hold the adapter; "hrw-slots", "loraserve" (`placed`).

    slo: seconds per token, for policies that keep to one. mean_output_tokens: of an answer; without it, policies that
    estimate learn it from the answers that have ended. sees_ranks, prices_prefill: a control takes them away; without
    ranks every adapter has the mean of the workload's requests, without prices prompts take no time. slots: adapters of
    a replica, for hrw-slots. choices: it chooses among so many replicas that are drawn for each request; default: all.
    staleness: seconds between two reports of the replicas, 0: it knows everything. counts_own: between them it counts
    what it sends, as a cluster's one front.
    """

    policy: str
    slo: PositiveFloat | None = None
    mean_output_tokens: PositiveFloat | None = None
    slots: PositiveInt | None = None
    choices: PositiveInt | None = None
    staleness: float = Field(default=0.0, ge=0)
    counts_own: bool = False
    sees_ranks: bool = True
    prices_prefill: bool = True

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Router:
        if self.policy in ("rank-aware", "least-delay") and self.slo is None:
            raise ValueError(f"the policy {self.policy} needs router.slo; set it")
        if (self.policy == "hrw-slots") != (self.slots is not None):
            raise ValueError("router.slots is for the policy hrw-slots, which needs it; set both or neither")
        if self.counts_own and not self.staleness:
            raise ValueError("router.counts_own is for old reports; set router.staleness, too")
        if not self.prices_prefill and self.policy != "rank-aware":
            raise ValueError(f"the policy {self.policy} has no prefill term; leave router.prices_prefill out")
        return self

    @field_validator("policy")
    @classmethod
    def _is_known(cls, policy: str) -> str:
        name = policy.replace("_", "-")
        if name not in (known := (*BASELINES, *POLICIES)):
            raise ValueError(f"is {policy!r}; use one of {', '.join(known)}")
        return name


class Migrate(Strict):
    """Requests move between replicas. planner: see `server.cluster.placement`. settings: fields of its settings."""

    planner: Literal["newest", "greedy", "ilp", "rounding"]
    settings: dict[str, float] = {}

    def parsed(self) -> MigrationSettings:
        return MigrationSettings.of(f"{name}={value:g}" for name, value in self.settings.items())

    @model_validator(mode="after")
    def _has_such_settings(self) -> Migrate:
        self.parsed()
        return self


class Preload(Strict):
    """Adapters that are in the replicas' arenas from the start, by the requests of the first `fit_seconds`; only later
    requests are served.

    rule: "burst-tolerance" (dLoRA §5.1); controls: "known", the same without rates, for the adapters that were asked
    for; "popular", the same ones everywhere, most requests first; "none". kv_share: of the pages, which no adapter
    is preloaded into.
    """

    rule: Literal["burst-tolerance", "known", "popular", "none"]
    fit_seconds: PositiveFloat
    kv_share: float = Field(default=0.5, ge=0, lt=1)


class Flash(Strict):
    """A flash crowd: from `at` for `seconds`, a `share` of the requests are for one adapter, by its number."""

    adapter: int = Field(ge=0)
    at: float = Field(ge=0)
    seconds: PositiveFloat
    share: float = Field(gt=0, le=1)


class Scale(Strict):
    """Replicas follow the load between `least` and the setup's number, with which it begins (`Scaling`).

    boot_seconds: until a replica that is started serves. steady_seconds: for which a hint must hold.
    """

    least: PositiveInt
    boot_seconds: float = Field(default=30.0, ge=0)
    steady_seconds: PositiveFloat = STEADY_SECONDS


class Limit(Strict):
    """The row's load is what its replicas bear: the rate at which a metric reaches `value`, by straight lines between
    the last rate of `rates` at which it is below and the first at which it is above. The row's metrics are of the
    latter.
    """

    metric: str
    value: PositiveFloat
    rates: list[PositiveFloat] = Field(min_length=2)

    @field_validator("rates")
    @classmethod
    def _rises(cls, rates: list[float]) -> list[float]:
        if rates != sorted(set(rates)):
            raise ValueError("rates must rise")
        return rates


class Setup(Strict):
    """Setup of one row's simulation.

    profile: name or path. terms: other values for terms of its cost models, as "link.per_byte". targets: projections
    with adapters. replicas, router: the cluster. engine: fields of `EngineConfig`. clients: requests come from this
    many clients, each of which sends the next one after an answer; otherwise at the workload's arrivals. warmup: first
    seconds; the metrics leave out their requests. flood: a tenant; the others' metrics leave out its requests; only the
    requests for one in `flood_keeps` of its adapters come, while the others' stay the same. slo: seconds per token, the
    prompt's time included. stream, mix, most_prompts, most_rows, keep_idle, tells_tenants: `Replica`'s; assist: when
    the CPU computes LoRA of adapters on their way. placement: for each replica, or the first few,
    numbers of adapters that it has in the arena from the start, the most popular being 0. preload, migration, flash,
    scaling, limit: see `Preload` and so on. mode: a policy of modes that only studies compare with, in place of the
    engine's (`MergedOnly`). mode_prices: what the engine's compares modes by. static: batches of one adapter in place
    of the engine (`static_batches`). directory: of the study's file, from which relative paths of the profile and of
    traces count.
    """

    profile: str
    terms: dict[str, float] = {}
    targets: list[str] = list(MODULES)
    replicas: PositiveInt = 1
    router: Router = Router(policy="first")
    engine: dict[str, Any] = {}
    workload: dict[str, Any]
    clients: PositiveInt | None = None
    warmup: float = Field(default=0.0, ge=0)
    flood: str | None = None
    flood_keeps: PositiveInt = 1
    slo: PositiveFloat | None = None
    placement: list[list[int]] = []
    preload: Preload | None = None
    migration: Migrate | None = None
    flash: Flash | None = None
    scaling: Scale | None = None
    limit: Limit | None = None
    stream: bool = True
    mix: bool = True
    most_prompts: PositiveInt | None = None
    most_rows: PositiveInt | None = None
    keep_idle: bool = True
    tells_tenants: bool = True
    assist: Literal["never", "always", "chosen"] = "chosen"
    mode: Literal["merged-only"] | None = None
    static: bool = False
    mode_prices: Literal["learned", "profile"] = "learned"
    directory: Path | None = None
