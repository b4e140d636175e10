"""Studies as data: a setup, rows that differ from it in a few fields, and published numbers for each row.

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

Tests: tests/perf/simulate/test_studies.py
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, ValidationError, model_validator

from ..workload.fields import Strict, put, read_fields, wrong_fields
from .metrics import METRICS
from .setup import Setup, StudyError


class Row(Strict):
    """One line of the table."""

    name: str = Field(min_length=1)
    group: str = ""
    set: dict[str, Any] = {}
    """Dotted fields that replace the setup's."""
    paper: dict[str, float | str] = {}
    """Metric → number, or words."""
    reference: str | None = None
    """Name of the row that `…_increase` metrics are relative to."""


class Order(Strict):
    """A claimed order of rows, without numbers: from the least value to the largest."""

    order: list[str | float] = Field(min_length=2)
    """Rows; in a figure, a number is a bound in the row's unit."""
    source: str = Field(min_length=2)
    """Where it is claimed; "ours" for the study's own claim."""
    metric: str = ""
    """Of a study's rows."""
    within: float = Field(default=0.0, ge=0)
    """Tolerance by which a row may be above the next one: 0.02 claims that it is at most 2 % worse."""
    least: bool = False
    most: bool = False
    """The first row is the least, or the most, and nothing is claimed about the order of the others."""
    alike: bool = False
    """All are equal within the tolerance."""

    @property
    def rows(self) -> list[str]:
        return [name for name in self.order if isinstance(name, str)]

    @property
    def pairs(self) -> list[tuple[str | float, str | float]]:
        """Pairs of rows whose first is claimed to be below the second."""
        first, *others = self.order
        if self.most:
            return [(other, first) for other in others]
        return [(first, other) for other in others] if self.least else list(itertools.pairwise(self.order))


class Axis(Strict):
    """Fields that are varied, with everything else equal, to see where orders hold."""

    name: str = Field(min_length=1)
    fields: list[str] = Field(min_length=1)
    """Dotted fields of the setup; several change together."""
    factors: list[PositiveFloat] = []
    """Factors of each row's own value; integers stay integers, and for a rate's curve the rates are multiplied."""
    values: list[Any] = []
    """Values that replace it."""

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
            put(fields, _parts(name), value)


class Study(Strict):
    """A parsed file."""

    name: str
    """The file's."""
    title: str
    source: str
    why: str
    metrics: list[str] = Field(min_length=1)
    setup: dict[str, Any]
    quick: dict[str, Any] = {}
    seeds: PositiveInt = 10
    """Number of runs of each row, with seeds from 0 on."""
    quick_seeds: PositiveInt = 3
    """Seeds of the quick version. With one, the workload's own seed counts."""
    quick_rows: str = ""
    """A regular expression; the quick version has the rows whose names contain a match."""
    rows: list[Row] = Field(min_length=1)
    expect: list[Order] = []
    region: list[Axis] = []
    """See `Axis`."""
    needs: dict[str, str] = {}
    """Files outside the package, by name, and how to get each; they are in `directory`."""
    directory: Path | None = None

    @property
    def missing(self) -> str | None:
        """How to get the first file that it needs and that is missing."""
        there = self.directory or Path()
        lacks = (f"{self.name} needs {name}: {how}" for name, how in self.needs.items() if not (there / name).is_file())
        return next(lacks, None)

    @model_validator(mode="after")
    def _names_exist(self) -> Study:
        rows = [row.name for row in self.rows]
        if len(set(rows)) < len(rows):
            raise ValueError("two rows have one name; rename one")
        if not any(re.search(self.quick_rows, name) for name in rows):
            raise ValueError(f"quick_rows is {self.quick_rows!r}, which matches no row's name")
        published = [metric for row in self.rows for metric in row.paper]
        for metric in [*self.metrics, *(each.metric for each in self.expect), *published]:
            if metric not in METRICS:
                raise ValueError(f"{metric!r} is not a metric; use one of {', '.join(METRICS)}")
        named = [name for each in self.expect for name in each.rows]
        for name in [*named, *(row.reference for row in self.rows if row.reference is not None)]:
            if name not in rows:
                raise ValueError(f"{name!r} is not a row; name one of {', '.join(rows)}")
        return self

    def part(self, names: str) -> Study:
        """The study with only the rows whose names contain a match of a regular expression, the rows that these refer
        to, and their claims. Raises StudyError if no name matches.
        """
        try:
            found = {row.name for row in self.rows if re.search(names, row.name)}
        except re.error as error:
            raise StudyError(f"{self.name}: rows: {names!r} is not a regular expression ({error}); fix it") from None
        if not found:
            all_names = ", ".join(row.name for row in self.rows)
            raise StudyError(f"{self.name}: rows: {names!r} matches no row; the rows are {all_names}")
        found |= {row.reference for row in self.rows if row.name in found and row.reference is not None}
        rows = [row for row in self.rows if row.name in found]
        expect = [each for each in self.expect if found >= set(each.rows)]
        return self.model_copy(update={"rows": rows, "expect": expect})

    def setup_of(
        self,
        row: Row,
        *,
        quick: bool = False,
        scale: float = 1.0,
        seed: int | None = None,
        at: tuple[Axis, Any] | None = None,
    ) -> Setup:
        """Return the row's setup. scale: multiplies its duration. at: an axis and one of its points.

        Raises StudyError.
        """
        changes = [*(self.quick.items() if quick else ()), *row.set.items()]
        return make_setup(self, changes, f"{self.name}: row {row.name!r}", scale=scale, seed=seed, at=at)


def make_setup(
    study: Any,
    changes: Iterable[tuple[str, Any]],
    origin: str,
    *,
    scale: float = 1.0,
    seed: int | None = None,
    at: tuple[Axis, Any] | None = None,
) -> Setup:
    """Return the setup of a study or a figure with other values for dotted fields. Raises StudyError."""
    fields = copy.deepcopy(study.setup)
    for name, value in changes:
        put(fields, _parts(name), value)
    if at is not None:
        at[0].vary(fields, at[1], origin)
    _scale(fields, scale)
    if seed is not None:
        fields.setdefault("workload", {})["seed"] = seed
    if study.directory is not None:
        fields["directory"] = study.directory
    return validated(Setup, fields, origin)


def _parts(name: str) -> list[str]:
    """Return the table of a dotted field, and its key."""
    # keys may contain dots
    return ["terms", name.removeprefix("terms.")] if name.startswith("terms.") else name.split(".")


def _get(fields: dict[str, Any], name: str) -> Any:
    """Return the value of a dotted field, or None."""
    value: Any = fields
    for part in _parts(name):
        value = value.get(part) if isinstance(value, dict) else None
    return value


def _scaled(value: Any, factor: float) -> Any:
    """Return a number or a rate's curve times `factor`; None for anything else."""
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
    if "requests" in (workload := fields.get("workload", {})):
        workload["requests"] = max(1, round(workload["requests"] * scale))


def shipped_studies() -> list[str]:
    """Names of the studies that come with the package."""
    return sorted(each.name.removesuffix(".toml") for each in _shipped().iterdir() if each.name.endswith(".toml"))


def load_study(name: str, traces: Path | None = None) -> Study:
    """A shipped study by its name, or a file by its path. traces: directory of the files that a shipped one needs.

    Raises StudyError.
    """
    if name in shipped_studies():
        return parse_study(read_fields(_shipped().joinpath(f"{name}.toml")), name, directory=traces)
    if not Path(name).is_file():
        known = ", ".join(shipped_studies())
        raise StudyError(f"{name} is neither a file nor a shipped study; shipped are {known}")
    return parse_study(read_fields(Path(name)), Path(name).stem, name, Path(name).parent)


def parse_study(fields: dict[str, Any], name: str, origin: str | None = None, directory: Path | None = None) -> Study:
    """directory: from which relative paths count.

    Raises StudyError, which begins with `origin`, for any fault, including the rows' setups.
    """
    study = validated(Study, {**fields, "name": name, "directory": directory}, origin or name)
    for row in study.rows:
        study.setup_of(row)
        for axis in study.region:
            for point in axis.points:
                study.setup_of(row, at=(axis, point))
    return study


def validated(kind: Any, fields: Mapping[str, Any], origin: str) -> Any:
    """Raises StudyError for the first wrong field."""
    try:
        return kind.model_validate_json(json.dumps(fields, default=str))
    except ValidationError as error:
        raise StudyError(wrong_fields(origin, fields, error).partition("\n")[0]) from None


def _shipped() -> Any:
    return files(str(__package__)) / "studies"
