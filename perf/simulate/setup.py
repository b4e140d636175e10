"""Setups: the parts of one simulation of a study or a figure, as fields of its file.

Tests: tests/perf/simulate/test_serving.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from ...server.cluster.placement.settings import MigrationSettings
from ...server.cluster.router import POLICIES
from ...server.cluster.router.scale import STEADY_SECONDS
from ..workload.fields import Strict, WorkloadError

#: Policies that only studies have.
BASELINES = ("first", "round-robin", "hrw-slots", "loraserve")


class StudyError(WorkloadError):
    """A study can't be run; the text names the file, the field and the fix."""


class Router(Strict):
    """The policy that routes requests: "first", a name of `POLICIES` with _ or - between its words, or a baseline:
    "round-robin", the replicas that hold the adapter in rotation; "hrw-slots", "loraserve" (`placed`).
    """

    policy: str
    slo: PositiveFloat | None = None
    """Seconds per token, for policies with an SLO."""
    mean_output_tokens: PositiveFloat | None = None
    """Tokens of a completion; without it, policies that estimate learn it from completions that have ended."""
    slots: PositiveInt | None = None
    """Adapters of a replica, for hrw-slots."""
    choices: PositiveInt | None = None
    """The policy chooses among so many random replicas for each request; default: all."""
    staleness: float = Field(default=0.0, ge=0)
    """Seconds between two reports of the replicas; 0: the router knows everything."""
    counts_own: bool = False
    """Between reports it counts its own requests, like a cluster's only API server."""
    sees_ranks: bool = True
    prices_prefill: bool = True
    """A control switches these off: without ranks every adapter has the mean of the workload's requests, without prices
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
    """Adapters that are resident from the start, by the requests of the first `fit_seconds`; only later requests are
    served.
    """

    rule: Literal["burst-tolerance", "known", "popular", "none"]
    """"burst-tolerance" (dLoRA §5.1); controls: "known", the same without rates, for the requested adapters; "popular",
    the same adapters everywhere, most requests first; "none".
    """
    fit_seconds: PositiveFloat
    kv_share: float = Field(default=0.5, ge=0, lt=1)
    """Share of the pages that stays free of preloaded adapters."""


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
    """Seconds until a new replica serves."""
    steady_seconds: PositiveFloat = STEADY_SECONDS
    """Seconds for which a hint must hold."""


class Limit(Strict):
    """The row's load is the replicas' capacity: the rate at which a metric reaches `value`, by linear interpolation
    between the last of `rates` at which it is below and the first at which it is above. The row's metrics are those of
    the latter rate.
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
    """Other values for terms of its cost models, such as "link.per_byte"."""
    targets: list[str] | None = None
    """Projections with adapters; by default all."""
    replicas: PositiveInt = 1
    router: Router = Router(policy="first")
    """The cluster."""
    engine: dict[str, Any] = {}
    """Fields of `EngineConfig`."""
    workload: dict[str, Any]
    clients: PositiveInt | None = None
    """Requests come from this many clients, each of which sends the next one after a completion; otherwise at the
    workload's arrivals.
    """
    warmup: float = Field(default=0.0, ge=0)
    """First seconds; their requests don't count in the metrics."""
    flood: str | None = None
    """A tenant whose requests don't count in the metrics; only its requests for one in `flood_keeps` of its adapters
    come, while the others' stay the same.
    """
    flood_keeps: PositiveInt = 1
    slo: PositiveFloat | None = None
    """Seconds per token, including the prompt's time."""
    placement: list[list[int]] = []
    """For each replica, or the first few, numbers of adapters that are resident from the start; 0 is the most
    popular.
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
    """When the CPU computes LoRA of incoming adapters."""
    mode: Literal["merged-only"] | None = None
    """A mode policy for comparisons in studies, instead of the engine's (`MergedOnly`)."""
    static: bool = False
    """Batches of one adapter instead of the engine (`static_batches`)."""
    mode_prices: Literal["learned", "profile"] = "learned"
    """Prices by which the engine's policy compares modes."""
    directory: Path | None = None
    """Directory of the study's file, from which relative paths of the profile and of traces count."""
