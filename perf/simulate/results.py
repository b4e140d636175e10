"""Runs a study with many seeds, compares its rows seed by seed, and counts the seeds in which each order holds."""

from __future__ import annotations

import itertools
import math
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import parent_process
from statistics import median
from typing import Any, NamedTuple, TypeVar

from ...memory.host.child_python import spawn_context
from ..workload.fields import WorkloadError
from .metrics import INCREASES
from .serving import run_serving
from .setup import Setup, StudyError
from .static_batches import static_batches
from .study import Axis, Order, Study

#: Significant digits of results: more than a reader needs, but not affected by the order of sums.
_DIGITS = 7

#: Least probability with which an interval contains the median of all seeds, if there are enough of them.
CONFIDENCE = 0.95

K = TypeVar("K")

#: Metrics of each row, in one run.
_Run = dict[str, dict[str, float]]


class Spread(NamedTuple):
    """The median over the seeds, and an interval for the median over all possible seeds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        rank, _ = interval(len(ordered))
        return cls(*map(_rounded, (median(ordered), ordered[rank], ordered[-1 - rank])))

    def text(self, scale: float, form: str) -> str:
        """The median and, in brackets, the interval if it is not a point."""
        middle, low, high = (f"{scale * each:{form}}" for each in self)
        return f"{middle} [{low}, {high}]" if self.low < self.high else middle


@dataclass(frozen=True, slots=True)
class Pair:
    """Two rows of an order."""

    low: str
    high: str
    held: int
    """Seeds in which they are in this order."""
    gap: Spread
    """High - low, of each seed's two runs."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """An order of rows, and the number of `seeds` in which it holds: no pair is reversed, or equal."""

    order: Order
    pairs: list[Pair]
    held: int
    seeds: int
    """1 if no row depends on one."""

    def holds_in(self, share: float) -> bool:
        """True if it holds in that share of the seeds."""
        return self.held >= share * self.seeds

    def to_json(self) -> dict[str, Any]:
        order = self.order
        return {
            "metric": order.metric,
            "rows": order.order,
            "source": order.source,
            "within": order.within,
            "held": self.held,
            "seeds": self.seeds,
            "pairs": list(map(asdict, self.pairs)),
        }


def judge(
    order: Order, values: Mapping[str, Sequence[float]], pairs: Sequence[tuple[str | float, str | float]] | None = None
) -> Verdict:
    """values: of each row, one for each seed, or a single one. pairs: default: the order's own."""
    seeds = max(len(values[name]) for name in order.rows)

    def column(each: str | float) -> list[float]:
        found = values[each] if isinstance(each, str) else [each]
        return [*found] * (seeds // len(found))

    if order.alike:
        held = sum(max(at) <= (1 + order.within) * min(at) for at in zip(*map(column, order.order), strict=True))
        return Verdict(order, [], held, seeds)
    found, holds = [], []
    for low, high in order.pairs if pairs is None else pairs:
        both = list(zip(column(low), column(high), strict=True))
        holds.append([one < other * (1 + order.within) for one, other in both])
        found.append(Pair(str(low), str(high), sum(holds[-1]), Spread.of(_rounded(b - a) for a, b in both)))
    return Verdict(order, found, sum(map(all, zip(*holds, strict=True))), seeds)


@dataclass(frozen=True, slots=True)
class Strip:
    """One axis of the region: the orders at each of its points."""

    axis: Axis
    points: list[tuple[Any, list[Verdict]]]


@dataclass(frozen=True)
class Results:
    """A study's options and results."""

    study: Study
    quick: bool
    scale: float
    seeds: list[int | None]
    """Of the runs."""
    spreads: dict[str, dict[str, Spread]]
    """Each row's metrics."""
    orders: list[Verdict]
    failed: dict[str, tuple[int, int]]
    """By row, the requests that were refused or ended with an error, over all seeds, and all requests. Rows without
    failures are left out, and points of the region are separate rows.
    """
    region: list[Strip]
    """Empty unless requested."""

    def holds_in(self, share: float) -> bool:
        """True if no request failed, and every order holds in that share of the seeds."""
        return not self.failed and all(order.holds_in(share) for order in self.orders)

    def to_json(self) -> dict[str, Any]:
        """Plain values; the same study, scale and seeds give the same values on every run."""
        names = self.study.metrics
        found: dict[str, Any] = {
            "study": self.study.name,
            "load": {"quick": self.quick, "scale": self.scale, "seeds": self.seeds},
            "rows": [
                {"row": row.name, **{name: self.spreads[row.name][name].median for name in names}, "paper": row.paper}
                for row in self.study.rows
            ],
            "spreads": {row.name: {name: self.spreads[row.name][name] for name in names} for row in self.study.rows},
            "orders": [order.to_json() for order in self.orders],
        }
        if self.failed:
            found["failed"] = self.failed
        if self.region:
            found["region"] = [
                {
                    "axis": strip.axis.name,
                    "fields": strip.axis.fields,
                    "points": [
                        {"point": point, "orders": [order.to_json() for order in orders]}
                        for point, orders in strip.points
                    ],
                }
                for strip in self.region
            ]
        return found


def run_study(
    study: Study,
    *,
    quick: bool = False,
    scale: float = 1.0,
    seed: int | None = None,
    seeds: int | None = None,
    jobs: int = 1,
    region: bool = False,
    only: str | None = None,
    progress: Callable[[str], None] = lambda row: None,
) -> Results:
    """Simulate every row with every seed; rows of one seed are compared, as they have the same requests.

    seed: the first. seeds: how many; default: the study's own number. jobs: processes; the results don't depend on
    them. region: also at every point of the study's axes, at its quick size. only: rows, see `Study.part`. progress:
    called with a row's name once it has been simulated. Raises StudyError.
    """
    if quick:
        study = study.part(study.quick_rows)
    if only is not None:
        study = study.part(only)
    count = seeds or (study.quick_seeds if quick else study.seeds)
    numbers: list[int | None] = [seed] if count == 1 else list(range(seed or 0, (seed or 0) + count))
    places: list[tuple[Axis, Any] | None] = [None]
    if region:
        places += [(axis, point) for axis in study.region for point in axis.points]
    found = simulate(
        {
            (index, number, row.name): Task(
                f"{study.name}: row {row.name!r}",
                study.setup_of(row, quick=quick or place is not None, scale=scale, seed=number, at=place),
            )
            for (index, place), number, row in itertools.product(enumerate(places), numbers, study.rows)
        },
        jobs=jobs,
        progress=progress,
    )
    runs = [
        [_completed(study, {row.name: found[index, number, row.name] for row in study.rows}) for number in numbers]
        for index in range(len(places))
    ]
    spreads = {
        row.name: {name: Spread.of(run[row.name][name] for run in runs[0]) for name in runs[0][0][row.name]}
        for row in study.rows
    }
    orders = [_orders(study, same) for same in runs]
    at = iter(orders[1:])
    strips = [Strip(axis, [(point, next(at)) for point in axis.points]) for axis in study.region] if region else []
    failed = _failures(study, places, runs)
    return Results(
        study, quick, scale=scale, seeds=numbers, spreads=spreads, orders=orders[0], failed=failed, region=strips
    )


def interval(count: int) -> tuple[int, float]:
    """Return k, and the probability that the k+1-th smallest and largest of `count` values enclose the median.

    By order statistics, which assume nothing about the distribution: the narrowest interval with `CONFIDENCE`, or all
    of the values if there are too few.
    """
    outside, best = 0.0, (0, 1 - 0.5 ** (count - 1) if count > 1 else 0.0)
    for rank in range(count // 2):
        outside += 2 * math.comb(count, rank) * 0.5**count
        if 1 - outside >= CONFIDENCE:
            best = rank, 1 - outside
    return best


@dataclass(frozen=True)
class Task:
    """One simulation."""

    origin: str
    """Prefix of errors."""
    setup: Setup


def simulate(
    tasks: Mapping[K, Task], *, jobs: int = 1, progress: Callable[[str], None] = lambda what: None
) -> dict[K, dict[str, float]]:
    """Metrics of each task; equal setups are simulated once. Raises StudyError."""
    found: dict[str, dict[str, float]] = {}
    keys = {name: task.setup.model_dump_json() for name, task in tasks.items()}
    todo = {keys[name]: task for name, task in tasks.items()}
    with map_of(min(jobs, len(todo))) as mapped:
        for (key, task), metrics in zip(todo.items(), mapped(_simulated, todo.values()), strict=True):
            found[key] = metrics
            progress(f"{len(found)} of {len(todo)}: {task.origin}")
    return {name: found[key] for name, key in keys.items()}


def _simulated(task: Task) -> dict[str, float]:
    setup = task.setup
    try:
        return static_batches(setup) if setup.static else run_serving(setup)
    except WorkloadError as error:
        raise StudyError(f"{task.origin}: {error}") from None


@contextmanager
def map_of(jobs: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map`, in so many processes."""
    if jobs <= 1:
        yield map
        return
    with ProcessPoolExecutor(jobs, mp_context=spawn_context(), initializer=_end_with_parent) as pool:
        try:
            yield pool.map
        finally:
            pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """End this process when its parent has ended, even if it was killed: its long computations are no longer needed."""
    parent = parent_process()

    def wait() -> None:
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _completed(study: Study, run: Mapping[str, Mapping[str, float]]) -> _Run:
    """The metrics of each row, rounded, with the metrics that compare rows."""
    full = {name: dict(metrics) for name, metrics in run.items()}
    for row in study.rows:
        metrics = full[row.name]
        for name, base in INCREASES.items():
            if base not in metrics:
                continue
            metrics[name] = 0.0 if row.reference is None else run[row.name][base] / run[row.reference][base] - 1
        missing = [name for name in study.metrics if name not in metrics]
        if missing:
            raise StudyError(f"{study.name}: metrics: this kind of study does not have {missing[0]}; take it out")
    return {name: {key: _rounded(value) for key, value in metrics.items()} for name, metrics in full.items()}


def _failures(
    study: Study, places: Sequence[tuple[Axis, Any] | None], runs: Sequence[Sequence[_Run]]
) -> dict[str, tuple[int, int]]:
    """See `Results.failed`."""
    found = {}
    for place, same in zip(places, runs, strict=True):
        at = "" if place is None else f" ({place[0].name} {place[1]})"
        for row in study.rows:
            failed = int(sum(run[row.name].get("failed", 0) for run in same))
            if failed:
                found[f"{row.name}{at}"] = failed, failed + int(sum(run[row.name]["requests"] for run in same))
    return found


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _orders(study: Study, runs: Sequence[_Run]) -> list[Verdict]:
    def values(metric: str, rows: Iterable[str]) -> dict[str, list[float]]:
        return {name: [run[name][metric] for run in runs] for name in rows}

    found = [judge(each, values(each.metric, each.rows)) for each in study.expect]
    for metric, group in itertools.product(study.metrics, dict.fromkeys(row.group for row in study.rows)):
        paper = {
            row.name: value
            for row in study.rows
            if row.group == group and isinstance(value := row.paper.get(metric), float)
        }
        rows = sorted(paper, key=paper.__getitem__)
        pairs = [(low, high) for low, high in itertools.combinations(rows, 2) if paper[low] < paper[high]]
        if pairs:
            found.append(judge(Order(order=[*rows], source=study.source, metric=metric), values(metric, rows), pairs))
    return found
