"""Studies as data: a setup, rows that differ from it in a few fields, and what was published for each row.

    title = "…"
    source = "where the published numbers are from"
    why = "why ours differ"
    metrics = ["ttft_mean", "ttft_p99"]

    [setup]                       # of every row: see `Setup`
    profile = "a10-llama2-7b-bgmv"
    [setup.workload]              # see perf.workload
    …

    [quick]                       # dotted fields of the setup for a run of a few seconds
    "workload.duration" = 20.0

    [[rows]]
    name = "first come, first served"
    set = { "engine.max_overtake_seconds" = 0.0 }
    paper = { ttft_mean = 0.142 }

    [[region]]                    # where orders hold: see `Axis`
    name = "load"
    fields = ["workload.arrivals.rate"]
    factors = [0.5, 0.7, 1.0, 1.3, 1.6]

A row's name is its key; rows of one `group` are compared with each other only.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
import tomllib
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, field_validator, model_validator

from ...server.cluster.placement.settings import MigrationSettings
from ...server.cluster.router import POLICIES
from ...server.cluster.router.scale import STEADY_SECONDS
from ..workload.model import Strict
from .metrics import METRICS

#: Policies that only studies have.
BASELINES = ("first", "round-robin", "hrw-slots", "loraserve")


class StudyError(ValueError):
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
            raise ValueError(f"it must be one of {', '.join(known)}")
        return name


class Step(Strict):
    """Something that is done to a replica at a time: `at` seconds. replica: its index; for "boot", none.

    do: "fail", "drain", "preload" of an `adapter`, by its number, or "boot", after which one more replica serves when
    `seconds` have passed.
    """

    at: float = Field(ge=0)
    do: Literal["fail", "drain", "boot", "preload"]
    replica: int | None = Field(default=None, ge=0)
    seconds: float = Field(default=0.0, ge=0)
    adapter: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _has_what_it_needs(self) -> Step:
        for name, value, wanted in (
            ("replica", self.replica, self.do != "boot"), ("adapter", self.adapter, self.do == "preload")
        ):  # fmt: skip
            if (value is None) == wanted:
                raise ValueError(
                    f"{self.do} needs {name}; set it" if wanted else f"{self.do} takes no {name}; leave it out"
                )
        return self


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
    many clients, each of which sends the next one `think` seconds after an answer, and `turns` of them in a row for one
    adapter on average; otherwise at the workload's arrivals. warmup: first seconds; the metrics leave out their
    requests. flood: a tenant; the others' metrics leave out its requests; only the requests for one in `flood_keeps`
    of its adapters come, while the others' stay the same. slo: seconds per token, the prompt's time included;
    slo_classes: of requests of a class of the workload's own. read_threads, stream, mix, most_prompts,
    most_rows, keep_idle, tells_tenants: `Replica`'s; tensor_parallel: its degree; assist: when the CPU computes LoRA of
    adapters on their way, see `Charges`. placement: for each replica, or the first few, numbers of adapters that it has
    in the arena from the start, the most popular being 0. script: what is done to replicas when. preload, migration,
    flash, scaling, limit: see `Preload` and so on. mode: a policy of modes
    that only studies compare with, in place of the engine's (`MergedOnly`). mode_prices: what the engine's compares
    modes by. static: batches of one adapter in place of the engine (`static_batches`). directory: of the study's file,
    from which relative paths of the profile and of traces count.
    """

    profile: str
    terms: dict[str, float] = {}
    targets: list[str] = Field(default=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    replicas: PositiveInt = 1
    router: Router = Router(policy="first")
    engine: dict[str, Any] = {}
    workload: dict[str, Any]
    clients: PositiveInt | None = None
    think: float = Field(default=0.0, ge=0)
    turns: float = Field(default=1.0, ge=1)
    warmup: float = Field(default=0.0, ge=0)
    flood: str | None = None
    flood_keeps: PositiveInt = 1
    slo: PositiveFloat | None = None
    slo_classes: dict[str, PositiveFloat] = {}
    placement: list[list[int]] = []
    script: list[Step] = []
    preload: Preload | None = None
    migration: Migrate | None = None
    flash: Flash | None = None
    scaling: Scale | None = None
    limit: Limit | None = None
    read_threads: PositiveInt = 2
    stream: bool = True
    mix: bool = True
    most_prompts: PositiveInt | None = None
    most_rows: PositiveInt | None = None
    keep_idle: bool = True
    tells_tenants: bool = True
    tensor_parallel: PositiveInt = 1
    assist: Literal["never", "always", "chosen"] = "chosen"
    mode: Literal["merged-only"] | None = None
    static: bool = False
    mode_prices: Literal["learned", "profile"] = "learned"
    directory: Path | None = None


class Pool(Strict):
    """A pool of adapter memory under load: what a row of a fragmentation study simulates.

    allocator: "contiguous" gives the first hole that is large enough, "pages" fixed-size pages. sizes: bytes of an
    adapter and its weight. in_use: adapters that requests use between two loads. probe: size for which
    load time and the most adapters at once are reported. link: bytes per second; per_copy: seconds that each copy takes
    beside its bytes.
    """

    allocator: Literal["contiguous", "pages"]
    pool_bytes: PositiveInt
    page_bytes: PositiveInt
    sizes: list[tuple[PositiveInt, PositiveFloat]] = Field(min_length=1)
    cycles: PositiveInt
    in_use: PositiveInt
    probe: PositiveInt
    link: PositiveFloat
    per_copy: float = Field(ge=0)
    seed: int = Field(default=0, ge=0)


class Row(Strict):
    """One line of the table. set: dotted fields in place of the setup's. paper: metric → number, or words.

    reference: name of the row that `…_increase` metrics are relative to.
    """

    name: str = Field(min_length=1)
    group: str = ""
    set: dict[str, Any] = {}
    paper: dict[str, float | str] = {}
    reference: str | None = None


class Expectation(Strict):
    """An order that is claimed without numbers: rows from the least value of the metric to the largest.

    source: where it is claimed, "ours" for what the study itself is to show. within: by which share a row may be above
    the next one all the same: 0.02 claims that it is at most 2 % worse. least, most: the first row is the least, or the
    most, and nothing is claimed of the others among themselves.
    """

    metric: str
    order: list[str] = Field(min_length=2)
    source: str
    within: float = Field(default=0.0, ge=0)
    least: bool = False
    most: bool = False

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Rows of which the first is claimed to be below the second."""
        first, *others = self.order
        if self.most:
            return [(other, first) for other in others]
        return [(first, other) for other in others] if self.least else list(itertools.pairwise(self.order))


class Axis(Strict):
    """Fields that are varied, all else alike, to see where orders hold.

    fields: dotted, of the setup; with several, all change together. factors: of each row's own value; whole numbers
    stay whole, and of a rate's curve the rates are multiplied. values: in place of it.
    """

    name: str = Field(min_length=1)
    fields: list[str] = Field(min_length=1)
    factors: list[PositiveFloat] = []
    values: list[Any] = []

    @model_validator(mode="after")
    def _factors_or_values(self) -> Axis:
        if bool(self.factors) == bool(self.values):
            raise ValueError(f"the axis {self.name!r} needs either factors or values; give one of them")
        return self

    @property
    def points(self) -> list[Any]:
        return self.factors or self.values

    def vary(self, fields: dict[str, Any], point: Any, origin: str) -> None:
        """Set the axis's fields of a setup to their values at `point`, one of `points`. Raises StudyError."""
        for name in self.fields:
            value = _scaled(_get(fields, name), point) if self.factors else point
            if value is None:
                raise StudyError(
                    f"{origin}: region.{self.name}: {name} is {_get(fields, name)!r}, which no factor can multiply; "
                    "set a number, or give values"
                )
            _put(fields, name, value, origin)


class Study(Strict):
    """A file, parsed. name: the file's. seeds: how many runs each row has, with seeds from 0 on; quick_seeds: how many
    in the quick version. With one, the workload's own seed counts. quick_rows: a regular expression; the quick
    version has the rows with a name that it is found in. region: see `Axis`. needs: files that are no part of
    the package, by name, and how to get each; they lie in `directory`.
    """

    name: str
    title: str
    source: str
    why: str
    kind: Literal["serving", "fragmentation"] = "serving"
    metrics: list[str] = Field(min_length=1)
    setup: dict[str, Any]
    quick: dict[str, Any] = {}
    seeds: PositiveInt = 10
    quick_seeds: PositiveInt = 3
    quick_rows: str = ""
    rows: list[Row] = Field(min_length=1)
    expect: list[Expectation] = []
    region: list[Axis] = []
    needs: dict[str, str] = {}
    directory: Path | None = None

    @property
    def missing(self) -> str | None:
        """What to do about the first file that it needs and that is not there."""
        there = self.directory or Path()
        lacks = (f"{self.name} needs {name}: {how}" for name, how in self.needs.items() if not (there / name).is_file())
        return next(lacks, None)

    @model_validator(mode="after")
    def _names_exist(self) -> Study:
        rows = [row.name for row in self.rows]
        if len(set(rows)) < len(rows):
            raise ValueError("two rows have one name; rename one")
        if not any(re.search(self.quick_rows, name) for name in rows):
            raise ValueError(f"quick_rows is {self.quick_rows!r}, which no row's name has in it")
        told = [*self.metrics, *(each.metric for each in self.expect), *(key for row in self.rows for key in row.paper)]
        for metric in told:
            if metric not in METRICS:
                raise ValueError(f"{metric!r} is no metric; use one of {', '.join(METRICS)}")
        named = [name for each in self.expect for name in each.order]
        for name in [*named, *(row.reference for row in self.rows if row.reference is not None)]:
            if name not in rows:
                raise ValueError(f"{name!r} is no row; name one of {', '.join(rows)}")
        return self

    def part(self, names: str) -> Study:
        """The study with the rows alone whose names a regular expression is found in, with the rows that these refer
        to, and what is expected of them. Raises StudyError where it is found in no name.
        """
        try:
            found = {row.name for row in self.rows if re.search(names, row.name)}
        except re.error as error:
            raise StudyError(f"{self.name}: rows: {names!r} is no regular expression ({error}); mend it") from None
        if not found:
            all_names = ", ".join(row.name for row in self.rows)
            raise StudyError(f"{self.name}: rows: {names!r} is found in no name; the rows are {all_names}")
        found |= {row.reference for row in self.rows if row.name in found and row.reference is not None}
        rows = [row for row in self.rows if row.name in found]
        expect = [each for each in self.expect if found >= set(each.order)]
        return self.model_copy(update={"rows": rows, "expect": expect})

    def setup_of(
        self,
        row: Row,
        *,
        quick: bool = False,
        scale: float = 1.0,
        seed: int | None = None,
        at: tuple[Axis, Any] | None = None,
    ) -> Setup | Pool:
        """Return the row's setup. scale: multiplies its duration. at: an axis and one of its points.

        Raises StudyError.
        """
        fields = copy.deepcopy(self.setup)
        for name, value in [*(self.quick.items() if quick else ()), *row.set.items()]:
            _put(fields, name, value, f"{self.name}: row {row.name!r}")
        if at is not None:
            at[0].vary(fields, at[1], f"{self.name}: row {row.name!r}")
        _scale(fields, scale)
        if seed is not None:
            fields.setdefault("workload", {})["seed"] = seed
        if self.kind == "fragmentation":
            workload = fields.pop("workload", {})
            fields["seed"] = workload.get("seed", fields.get("seed", 0))
        elif self.directory is not None:
            fields["directory"] = self.directory
        kind = Setup if self.kind == "serving" else Pool
        return validated(kind, fields, f"{self.name}: row {row.name!r}")


def _parts(name: str) -> list[str]:
    """Return the tables of a dotted field, and its key."""
    return ["terms", name.removeprefix("terms.")] if name.startswith("terms.") else name.split(".")  # keys have dots


def _put(fields: dict[str, Any], name: str, value: Any, origin: str) -> None:
    *tables, last = _parts(name)
    for table in tables:
        fields = fields.setdefault(table, {})
        if not isinstance(fields, dict):
            raise StudyError(f"{origin}: {name}: {table} is no table; check the dotted name")
    fields[last] = value


def _get(fields: dict[str, Any], name: str) -> Any:
    """Return the value of a dotted field, or None."""
    value: Any = fields
    for part in _parts(name):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _scaled(value: Any, factor: float) -> Any:
    """Return a number or a rate's curve times `factor`; None for all else."""
    if isinstance(value, dict) and "points" in value:
        return {**value, "points": [[time, each * factor] for time, each in value["points"]]}
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return max(1, round(value * factor)) if isinstance(value, int) else value * factor


def _scale(fields: dict[str, Any], scale: float) -> None:
    for table, name, least in ((fields.get("workload", {}), "duration", 0.001), (fields, "warmup", 0.0)):
        if name in table:
            table[name] = max(least, float(table[name]) * scale)
    rate = fields.get("workload", {}).get("arrivals", {}).get("rate")
    if isinstance(rate, dict) and "points" in rate:
        rate["points"] = [[time * scale, value] for time, value in rate["points"]]
    for table, name in ((fields.get("workload", {}), "requests"), (fields, "cycles")):
        if name in table:
            table[name] = max(1, round(table[name] * scale))


def shipped_studies() -> list[str]:
    """Names of the studies that come with the package."""
    return sorted(each.name.removesuffix(".toml") for each in _shipped().iterdir() if each.name.endswith(".toml"))


def load_study(name: str, traces: Path | None = None) -> Study:
    """A shipped study by its name, or a file by its path. traces: where the files lie that a shipped one needs.

    Raises StudyError.
    """
    if name in shipped_studies():
        return parse_study(_shipped().joinpath(f"{name}.toml").read_text("utf-8"), name, directory=traces)
    path = Path(name)
    try:
        return parse_study(path.read_text("utf-8"), path.stem, str(path), path.parent)
    except FileNotFoundError:
        known = ", ".join(shipped_studies())
        raise StudyError(f"{name} is neither a file nor a shipped study; shipped are {known}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise StudyError(f"{name}: can't be read ({error}); check the path") from None


def parse_study(text: str, name: str, origin: str | None = None, directory: Path | None = None) -> Study:
    """directory: from which relative paths count.

    Raises StudyError, which begins with `origin`, for what is wrong anywhere in it, the rows' setups included.
    """
    origin = origin or name
    study = validated(Study, {**read_toml(text, origin), "name": name, "directory": directory}, origin)
    for row in study.rows:
        study.setup_of(row)
        for axis in study.region:
            for point in axis.points:
                study.setup_of(row, at=(axis, point))
    return study


def read_toml(text: str, origin: str) -> dict[str, Any]:
    """Raises StudyError, which begins with `origin`."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise StudyError(f"{origin}: not TOML ({error}); mend it") from None


def validated(kind: Any, fields: Mapping[str, Any], origin: str) -> Any:
    try:
        return kind.model_validate_json(json.dumps(fields, default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"]))
        message = first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            message = "no such field here; take it out, or check its spelling"
        elif first["type"] == "missing":
            message = "is missing; set it"
        elif field:
            message = f"is {first['input']!r:.80}: {message}"
        raise StudyError(f"{origin}: {field}: {message}" if field else f"{origin}: {message}") from None


def _shipped() -> Any:
    return files(__package__) / "studies"
