"""Computes the figures: all runs with all seeds, then rows and claims seed by seed.

Tests: tests/perf/simulate/test_figures.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from ..document import markdown_table
from ..results import Spread, Task, Verdict, judge, simulate
from ..serving import changed_profile
from ..setup import StudyError
from ..static_batches import decode_seconds, prefill_seconds
from .figure import UNITS, Figure, Price, Published, profile_path


@dataclass(frozen=True)
class Line:
    """One row of the table."""

    row: Published
    ours: Spread | None
    """In the row's unit; None if it is open or no run is named."""
    exact: bool
    """No seed affects it."""

    @property
    def ratio(self) -> float | None:
        """Ours relative to the published number."""
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
class FigureResult:
    """A figure's rows and claims, computed."""

    figure: Figure
    lines: list[Line]
    claims: list[Verdict]

    def to_json(self) -> dict[str, Any]:
        return {
            "figure": self.figure.name,
            "paper": self.figure.paper,
            "rows": [
                {
                    "row": line.row.name,
                    "published": line.row.published,
                    "unit": line.row.unit,
                    "ours": line.ours,
                    "ratio": line.ratio,
                    "status": line.status,
                    "open": line.row.open,
                }
                for line in self.lines
            ],
            "orders": [
                {
                    "rows": claim.order.order,
                    "kind": "alike" if claim.order.alike else "rising",
                    "held": claim.held,
                    "seeds": claim.seeds,
                }
                for claim in self.claims
            ],
        }


def compute(
    figures: Sequence[Figure],
    *,
    seeds: int = 10,
    first: int = 0,
    quick: bool = False,
    jobs: int = 1,
    progress: Callable[[str], None] = lambda what: None,
) -> list[FigureResult]:
    """seeds: how many, from `first` on; rows of one seed have the same requests. jobs: processes. Raises StudyError.

    progress: called with the name of each finished simulation.
    """
    each_seed = range(first, first + seeds)
    tasks = {
        (figure.name, run, seed): Task(f"{figure.name}: {run}", figure.setup_of(run, quick=quick, seed=seed))
        for figure in figures
        for run in figure.simulated
        for seed in each_seed
    }
    found = simulate(tasks, jobs=jobs, progress=progress)
    for each, task in tasks.items():
        if failed := found[each].get("failed"):
            raise StudyError(
                f"{task.origin}: {failed:.0f} requests were refused or failed; a figure counts no survivors"
            )
    return [_result(figure, found, each_seed) for figure in figures]


def _result(
    figure: Figure, found: Mapping[tuple[str, str, int], Mapping[str, float]], seeds: Sequence[int]
) -> FigureResult:
    prices = {name: {"value": price(run.price)} for name, run in figure.runs.items() if run.price is not None}

    def metric(run: str, name: str, seed: int) -> float:
        return (prices[run] if run in prices else found[figure.name, run, seed])[name]

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
    return FigureResult(figure, lines, [judge(order, values) for order in figure.orders])


def price(wanted: Price) -> float:
    """Return seconds or bytes, as `Price` defines."""
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
            found = costs.link.seconds(geometry.adapter_bytes(wanted.rank, wanted.targets))
        case "adapter":
            found = float(geometry.adapter_bytes(wanted.rank, wanted.targets))
        case "kv":
            found = float(geometry.page_layout(1).page_bytes * wanted.context)
    return found * wanted.share


HEADS = ["", "published", "ours", "ratio", "why not"]
_HEAD = """# The papers' figures

Written by `{command}`; do not edit. Every number that the texts print, with ours beside it: the median over
{seeds} seeds and, in brackets, an interval that holds the median of all seeds with at least 95 % (order statistics of
these seeds; with fewer than six, all of them). "exact" is a price in closed form, in which no seed is. Ratio is ours
over the published number. Open rows wait for the mechanism that they name. "picture only": the number is in the
figure's picture and in no text. Settings are the papers'; what they leave out was assumed once, alike for all rows of a
figure, and was not changed to make an order come out.
"""


def document(results: Sequence[FigureResult], command: str, seeds: int) -> str:
    """Return the page. command: the one that wrote it."""
    lines = [_HEAD.format(command=command, seeds=seeds), *_summary(results)]
    for paper, figures in groupby(results, key=lambda result: result.figure.paper):
        lines.append(f"\n## {paper}\n")
        for result in figures:
            lines += _figure(result)
    return "\n".join(lines) + "\n"


def _summary(results: Sequence[FigureResult]) -> Iterator[str]:
    lines = [line for result in results for line in result.lines]
    claims = [claim for result in results for claim in result.claims]
    near = [line for line in lines if line.ratio is not None and 0.9 <= line.ratio <= 1.1]
    fitted = sum(bool(line.row.fitted) for line in near)
    numbers = sum(line.ratio is not None for line in lines)
    opened = sum(line.status == "open" for line in lines)
    held = sum(claim.holds_in(0.8) for claim in claims)
    yield (
        f"{len(lines)} rows of {len(results)} figures: {numbers} have a published number and ours beside it, "
        f'{len(near)} of them within 10 %. Of these, constants were fitted to {fitted} ("fitted" says which), and '
        f"{len(near) - fitted} are predictions. {opened} are open. "
        f"{held} of {len(claims)} orders hold in at least 80 % of their seeds."
    )


def _figure(result: FigureResult) -> Iterator[str]:
    figure = result.figure
    yield f"### {figure.name}\n\n{figure.title}. Setting: {_flat(figure.setting)}"
    if figure.assumed:
        yield f"Assumed: {_flat(figure.assumed)}"
    for name, system in figure.systems.items():
        terms = "; ".join(f"`{term}` = {each.value:g}, {each.source}" for term, each in system.terms.items())
        yield f"\n* {name}: {_flat(system.does)}{f' ({terms})' if terms else ''}"
    yield ""
    yield from markdown_table(
        [*HEADS, "source"], ([line.row.name, *_cells(line), line.row.source] for line in result.lines)
    )
    if figure.why:
        yield f"\nWhy not, where a row does not say: {_flat(figure.why)}"
    if result.claims:
        yield ""
        claims = ([claim_text(claim), held_text(claim), claim.order.source] for claim in result.claims)
        yield from markdown_table(["order", "kept", "source"], claims)
    yield ""


def _cells(line: Line) -> list[str]:
    row = line.row
    if row.published is None:
        published = "picture only"
    else:
        published = row.published if isinstance(row.published, str) else f"{number(row.published)} {row.unit}".strip()
    why = f"open: {row.open}" if row.open is not None else row.why
    why = f"fitted: {row.fitted}. {why}" if row.fitted else why
    return [published, _ours(line), "" if line.ratio is None else f"{line.ratio:.2f}", _flat(why)]


def _ours(line: Line) -> str:
    if line.ours is None:
        return "—"
    median = f"{number(line.ours.median)} {line.row.unit}".strip()
    return f"{median} (exact)" if line.exact else f"{median} [{number(line.ours.low)}, {number(line.ours.high)}]"


def claim_text(claim: Verdict) -> str:
    order = claim.order
    if order.alike:
        return f"{', '.join(order.rows)} are alike within {order.within:.0%}"
    return " < ".join(each if isinstance(each, str) else number(each) for each in order.order)


def held_text(claim: Verdict) -> str:
    if claim.seeds == 1:
        return "yes" if claim.held else "no"
    return f"in {claim.held} of {claim.seeds} seeds"


def number(value: float) -> str:
    """Three significant digits, but all digits of a larger integer part."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _flat(text: str) -> str:
    return " ".join(text.split())
