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
    """

    policy: str
    slo: PositiveFloat | None = None
    """Seconds per token, for policies that keep to one."""
    mean_output_tokens: PositiveFloat | None = None
    """Of an answer; without it, policies that estimate learn it from the answers that have ended."""
    slots: PositiveInt | None = None
    """Adapters of a replica, for hrw-slots."""
    choices: PositiveInt | None = None
    """It chooses among so many replicas that are drawn for each request; default: all."""
    staleness: float = Field(default=0.0, ge=0)
    """Seconds between two reports of the replicas, 0: it knows everything."""
    counts_own: bool = False
    """Between them it counts what it sends, as a cluster's one front."""
    sees_ranks: bool = True
    prices_prefill: bool = True
    """A control takes them away; without ranks every adapter has the mean of the workload's requests, without prices
    prompts take no time.
    """

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
    """Requests move between replicas."""

    planner: Literal["newest", "greedy", "ilp", "rounding"]
    """See `server.cluster.placement`."""
    settings: dict[str, float] = {}
    """Fields of its settings."""

    def parsed(self) -> MigrationSettings:
        return MigrationSettings.of(f"{name}={value:g}" for name, value in self.settings.items())

    @model_validator(mode="after")
    def _has_such_settings(self) -> Migrate:
        self.parsed()
        return self


class Preload(Strict):
    """Adapters that are in the replicas' arenas from the start, by the requests of the first `fit_seconds`; only
    later requests are served.
    """

    rule: Literal["burst-tolerance", "known", "popular", "none"]
    """"burst-tolerance" (dLoRA §5.1); controls: "known", the same without rates, for the adapters that were asked
    for; "popular", the same ones everywhere, most requests first; "none".
    """
    fit_seconds: PositiveFloat
    kv_share: float = Field(default=0.5, ge=0, lt=1)
    """Of the pages, which no adapter is preloaded into."""


class Flash(Strict):
    """A flash crowd: from `at` for `seconds`, a `share` of the requests are for one adapter, by its number."""

    adapter: int = Field(ge=0)
    at: float = Field(ge=0)
    seconds: PositiveFloat
    share: float = Field(gt=0, le=1)


class Scale(Strict):
    """Replicas follow the load between `least` and the setup's number, with which it begins (`Scaling`)."""

    least: PositiveInt
    boot_seconds: float = Field(default=30.0, ge=0)
    """Until a replica that is started serves."""
    steady_seconds: PositiveFloat = STEADY_SECONDS
    """For which a hint must hold."""


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
    """Setup of one row's simulation."""

    profile: str
    """Name or path."""
    terms: dict[str, float] = {}
    """Other values for terms of its cost models, as "link.per_byte"."""
    targets: list[str] = list(MODULES)
    """Projections with adapters."""
    replicas: PositiveInt = 1
    router: Router = Router(policy="first")
    """The cluster."""
    engine: dict[str, Any] = {}
    """Fields of `EngineConfig`."""
    workload: dict[str, Any]
    clients: PositiveInt | None = None
    """Requests come from this many clients, each of which sends the next one after an answer; otherwise at the
    workload's arrivals.
    """
    warmup: float = Field(default=0.0, ge=0)
    """First seconds; the metrics leave out their requests."""
    flood: str | None = None
    """A tenant; the others' metrics leave out its requests; only the requests for one in `flood_keeps` of its
    adapters come, while the others' stay the same.
    """
    flood_keeps: PositiveInt = 1
    slo: PositiveFloat | None = None
    """Seconds per token, the prompt's time included."""
    placement: list[list[int]] = []
    """For each replica, or the first few, numbers of adapters that it has in the arena from the start, the most
    popular being 0.
    """
    preload: Preload | None = None
    migration: Migrate | None = None
    flash: Flash | None = None
    scaling: Scale | None = None
    limit: Limit | None = None
    """See `Preload` and so on."""
    stream: bool = True
    mix: bool = True
    most_prompts: PositiveInt | None = None
    most_rows: PositiveInt | None = None
    keep_idle: bool = True
    tells_tenants: bool = True
    """`Replica`'s."""
    assist: Literal["never", "always", "chosen"] = "chosen"
    """When the CPU computes LoRA of adapters on their way."""
    mode: Literal["merged-only"] | None = None
    """A policy of modes that only studies compare with, in place of the engine's (`MergedOnly`)."""
    static: bool = False
    """Batches of one adapter in place of the engine (`static_batches`)."""
    mode_prices: Literal["learned", "profile"] = "learned"
    """What the engine's compares modes by."""
    directory: Path | None = None
    """Of the study's file, from which relative paths of the profile and of traces count."""
