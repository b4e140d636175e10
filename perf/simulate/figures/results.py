"""Computes the figures: all runs with all seeds, then rows and claims seed by seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..results import Spread, Task, simulate
from ..serving import changed_profile
from ..static_batches import decode_seconds, prefill_seconds
from ..study import StudyError
from .figure import UNITS, Figure, Order, Price, Published, profile_path


@dataclass(frozen=True)
class Line:
    """One row of the table. ours: in the row's unit; None where it is open or no run is named. exact: no seed in it."""

    row: Published
    ours: Spread | None
    exact: bool

    @property
    def ratio(self) -> float | None:
        """Ours over the published number."""
        published = self.row.published
        if self.ours is None or isinstance(published, str) or not published:
            return None
        return self.ours.median / published

    @property
    def status(self) -> str:
        if self.ours is not None:
            return "computed"
        if self.row.open is not None:
            return "open"
        return "picture only" if self.row.published is None else "not computed"


@dataclass(frozen=True)
class Claim:
    """One order, and in how many of the seeds it holds. seeds: 1 where no row depends on one."""

    order: Order
    held: int
    seeds: int


@dataclass(frozen=True)
class FigureResult:
    """A figure's rows and claims, computed."""

    figure: Figure
    lines: list[Line]
    claims: list[Claim]

    def to_json(self) -> dict[str, Any]:
        return {
            "figure": self.figure.name,
            "paper": self.figure.paper,
            "rows": [
                {
                    "row": line.row.name, "published": line.row.published, "unit": line.row.unit,
                    "ours": None if line.ours is None else line.ours.to_json(), "ratio": line.ratio,
                    "status": line.status, "open": line.row.open,
                }
                for line in self.lines
            ],
            "orders": [
                {"rows": claim.order.rising or claim.order.alike, "kind": "rising" if claim.order.rising else "alike",
                 "held": claim.held, "seeds": claim.seeds}
                for claim in self.claims
            ],
        }  # fmt: skip


def compute(
    figures: Sequence[Figure],
    *,
    seeds: int = 10,
    first: int = 0,
    quick: bool = False,
    jobs: int = 1,
    told: Callable[[str], None] = lambda what: None,
) -> list[FigureResult]:
    """seeds: how many, from `first` on; rows of one seed have the same requests. jobs: processes. Raises StudyError.

    told: called with what has been simulated.
    """
    each_seed = range(first, first + seeds)
    tasks = {
        (figure.name, run, seed): Task(f"{figure.name}: {run}", figure.setup_of(run, quick=quick, seed=seed))
        for figure in figures for run in figure.simulated for seed in each_seed
    }  # fmt: skip
    found = simulate(tasks.values(), jobs=jobs, told=told)
    metrics_of = {each: found[task.key] for each, task in tasks.items()}
    for each, task in tasks.items():
        if failed := metrics_of[each].get("failed"):
            raise StudyError(
                f"{task.origin}: {failed:.0f} requests were refused or failed; a figure counts no survivors"
            )
    return [_result(figure, metrics_of, each_seed) for figure in figures]


def _result(
    figure: Figure, found: Mapping[tuple[str, str, int], Mapping[str, float]], seeds: Sequence[int]
) -> FigureResult:
    prices = {name: {"value": price(run.price)} for name, run in figure.runs.items() if run.price is not None}

    def metric(run: str, name: str, seed: int) -> float:
        metrics = prices[run] if run in prices else found[figure.name, run, seed]
        if name not in metrics:
            raise StudyError(f"{figure.name}: run {run!r} has no metric {name!r}; use one of {', '.join(metrics)}")
        return metrics[name]

    def value(row: Published, seed: int) -> float:
        assert row.run is not None
        if row.over is None:
            return metric(row.run, row.metric, seed) * UNITS[row.unit]
        return max(compared(row, *pair, seed) for pair in [(row.run, row.over), *row.also]) * UNITS[row.unit]

    def compared(row: Published, run: str, over: str, seed: int) -> float:
        other = metric(over, row.over_metric or row.metric, seed)
        ratio = metric(run, row.metric, seed) / other if other else float("inf")
        return {"increase": ratio - 1, "ratio": ratio, "saving": 1 - ratio}[row.form]

    values: dict[str, list[float]] = {}
    lines = []
    for row in figure.rows:
        exact = all(run in prices for run in row.runs)
        if row.run is not None:
            values[row.name] = [value(row, seed) for seed in (seeds[:1] if exact else seeds)]
        ours = Spread.of(values[row.name]) if row.run is not None else None
        lines.append(Line(row, ours, exact))
    return FigureResult(figure, lines, [_claim(order, values) for order in figure.orders])


def _claim(order: Order, values: Mapping[str, list[float]]) -> Claim:
    seeds = max(len(values[name]) for name in order.rows)
    columns = [
        values[each] * (seeds // len(values[each])) if isinstance(each, str) else [each] * seeds
        for each in [*order.rising, *order.alike]
    ]
    return Claim(order, sum(_holds(order, at) for at in zip(*columns, strict=True)), seeds)


def _holds(order: Order, at: tuple[float, ...]) -> bool:
    if order.alike:
        return max(at) <= (1 + order.within) * min(at)
    return all(low < high for low, high in itertools.pairwise(at))


def price(wanted: Price) -> float:
    """Return seconds or bytes, as `Price` says."""
    profile = changed_profile(profile_path(wanted.profile), {})
    costs, geometry = profile.costs(), profile.geometry
    adapters = wanted.rows if wanted.adapters is None else wanted.adapters
    match wanted.of:
        case "decode":
            found = decode_seconds(costs, wanted.rows, wanted.context, wanted.rank, adapters)
        case "lora":
            found = decode_seconds(costs, wanted.rows, wanted.context, wanted.rank, adapters)
            found -= decode_seconds(costs, wanted.rows, wanted.context, 0, 1)
        case "prefill":
            found = prefill_seconds(costs, wanted.rows, wanted.context, wanted.rank)
        case "load":
            found = costs.link.seconds(geometry.adapter_bytes(wanted.rank, tuple(wanted.targets)))
        case "adapter":
            found = float(geometry.adapter_bytes(wanted.rank, tuple(wanted.targets)))
        case "kv":
            found = float(geometry.page_layout(1).page_bytes * wanted.context)
    return found * wanted.share
