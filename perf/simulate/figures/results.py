"""Computes the figures: all runs with all seeds, then rows and claims seed by seed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..fragmentation import run_fragmentation
from ..results import Spread, map_of
from ..serving import run_serving
from ..study import Pool, Setup, StudyError
from .baselines import static_batches
from .figure import UNITS, Figure, Order, Published
from .prices import price


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
        (figure.name, run, seed): _Task(
            f"{figure.name}: {run}", figure.setup_of(run, quick=quick, seed=seed), figure.is_static(run)
        )
        for figure in figures for run in figure.simulated for seed in each_seed
    }  # fmt: skip
    distinct = {task.key: task for task in tasks.values()}
    found: dict[str, dict[str, float]] = {}
    with map_of(min(jobs, len(distinct))) as mapped:
        for place, (task, metrics) in enumerate(
            zip(distinct.values(), mapped(_simulated, distinct.values()), strict=True)
        ):
            found[task.key] = metrics
            told(f"{place + 1} of {len(distinct)}: {task.origin}")
    metrics_of = {each: found[task.key] for each, task in tasks.items()}
    return [_result(figure, metrics_of, each_seed) for figure in figures]


@dataclass(frozen=True)
class _Task:
    """One simulation. Equal keys give equal metrics."""

    origin: str
    setup: Setup | Pool
    static: bool

    @property
    def key(self) -> str:
        return f"{self.static}{self.setup.model_dump_json()}"


def _simulated(task: _Task) -> dict[str, float]:
    setup = task.setup
    try:
        if isinstance(setup, Pool):
            return run_fragmentation(setup).metrics
        if task.static:
            return static_batches(setup)
        outcome = run_serving(setup)
    except StudyError as error:
        raise StudyError(f"{task.origin}: {error}") from None
    metrics = dict(outcome.metrics)
    if failed := metrics["failed"]:
        raise StudyError(f"{task.origin}: {failed:.0f} requests were refused or failed; a figure counts no survivors")
    metrics["requests_per_second"] = metrics["requests"] / metrics["simulated_seconds"]
    # of the request that ended first: what it waited for loads, its own and others'
    metrics["first_cold"] = float(outcome.samples["cold_share"][0] * outcome.samples["e2e"][0])
    return metrics


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
