"""Runs a study, compares its rows with what was published, and writes both down."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

from .fragmentation import run_fragmentation
from .metrics import INCREASES
from .serving import Outcome, run_serving
from .study import Pool, Row, Setup, Study, StudyError

#: Significant digits of results: more than anybody reads, fewer than sums in another order would change.
_DIGITS = 7


@dataclass(frozen=True)
class Order:
    """One published order of rows by a metric, and whether ours is the same.

    wrong: pairs of rows that come in the other order here, or as equals. held: in how many runs, each with a seed of
    its own, none does.
    """

    metric: str
    rows: list[str]
    wrong: list[tuple[str, str]]
    source: str
    held: int = 0

    @property
    def holds(self) -> bool:
        return not self.wrong


@dataclass(frozen=True)
class Results:
    """A study's options and results: medians over its seeds."""

    study: Study
    quick: bool
    scale: float
    seed: int | None
    rows: list[tuple[Row, Outcome]]
    orders: list[Order]

    def to_json(self) -> dict[str, Any]:
        """Plain values; the same study, scale and seed give the same ones on every run."""
        return {
            "study": self.study.name,
            "load": {"quick": self.quick, "scale": self.scale, "seed": self.seed},
            "rows": [
                {"row": row.name, **{name: outcome.metrics[name] for name in self.study.metrics}, "paper": row.paper}
                for row, outcome in self.rows
            ],
            "orders": [
                {"metric": order.metric, "rows": order.rows, "holds": order.holds, "seeds": order.held}
                for order in self.orders
            ],
        }  # fmt: skip


def run_study(
    study: Study,
    *,
    quick: bool = False,
    scale: float = 1.0,
    seed: int | None = None,
    told: Callable[[str], None] = lambda row: None,
) -> Results:
    """told: called with a row's name before it is simulated. seed: the first, where the study has several.

    Raises StudyError.
    """
    start = seed or 0
    seeds = [seed] if study.seeds == 1 else list(range(start, start + study.seeds))
    runs: list[dict[str, Outcome]] = [{} for _ in seeds]
    for row in study.rows:
        told(row.name)
        for run, each in zip(runs, seeds, strict=True):
            run[row.name] = _run(study, row, study.setup_of(row, quick=quick, scale=scale, seed=each))
    for run in runs:
        _complete(study, run)
    rows = [(row, _median([run[row.name] for run in runs])) for row in study.rows]
    in_all, *in_each = (
        _orders(study, {name: outcome.metrics for name, outcome in run.items()})
        for run in ({row.name: outcome for row, outcome in rows}, *runs)
    )
    held = [sum(order.holds for order in same) for same in zip(*in_each, strict=True)]
    orders = [replace(order, held=count) for order, count in zip(in_all, held, strict=True)]
    return Results(study, quick, scale, seed, rows, orders)


def _complete(study: Study, run: dict[str, Outcome]) -> None:
    """Add the metrics that compare rows, and round all."""
    for row in study.rows:
        metrics = run[row.name].metrics
        for name, base in INCREASES.items():
            if row.reference is not None:
                metrics[name] = metrics[base] / run[row.reference].metrics[base] - 1
            elif base in metrics:
                metrics[name] = 0.0
        missing = [name for name in study.metrics if name not in metrics]
        if missing:
            raise StudyError(f"{study.name}: metrics: this kind of study does not have {missing[0]}; take it out")
    for outcome in run.values():
        outcome.metrics.update({name: _rounded(value) for name, value in outcome.metrics.items()})


def _median(runs: list[Outcome]) -> Outcome:
    """The first run, with the median of every metric."""
    metrics = {name: _rounded(median(run.metrics[name] for run in runs)) for name in runs[0].metrics}
    return replace(runs[0], metrics=metrics)


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _run(study: Study, row: Row, setup: Setup | Pool) -> Outcome:
    try:
        return run_serving(setup) if isinstance(setup, Setup) else run_fragmentation(setup)
    except StudyError as error:
        raise StudyError(f"{study.name}: row {row.name!r}: {error}") from None


def _orders(study: Study, outcomes: dict[str, dict[str, float]]) -> list[Order]:
    claimed = [(each.metric, each.order, list(itertools.pairwise(each.order)), each.source) for each in study.expect]
    for metric, group in itertools.product(study.metrics, dict.fromkeys(row.group for row in study.rows)):
        rows = [row for row in study.rows if row.group == group and isinstance(row.paper.get(metric), float)]
        rows.sort(key=lambda row: row.paper[metric])
        pairs = [
            (low.name, high.name)
            for low, high in itertools.combinations(rows, 2)
            if low.paper[metric] < high.paper[metric]
        ]
        if pairs:
            claimed.append((metric, [row.name for row in rows], pairs, study.source))
    return [
        Order(
            metric, rows, [pair for pair in pairs if not outcomes[pair[0]][metric] < outcomes[pair[1]][metric]], source
        )
        for metric, rows, pairs, source in claimed
    ]
