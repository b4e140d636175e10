"""Tables of results for people, goals that results are compared with, and summaries of distributions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np


@dataclass
class Table:
    """A title, columns and rows of numbers and words."""

    title: str
    columns: Sequence[str]
    rows: list[tuple[Any, ...]] = field(default_factory=list)

    def add(self, *cells: Any) -> None:
        if len(cells) != len(self.columns):
            raise ValueError(f"{self.title}: {len(cells)} cells for {len(self.columns)} columns")
        self.rows.append(cells)

    def show(self, console: Any = None) -> None:
        """Print it, wide enough if the output is not a terminal."""
        from rich.console import Console

        console = console or Console(width=140)
        console.print(self.title, style="bold", highlight=False, markup=False)
        console.print(self.render(), highlight=False)

    def render(self) -> Any:
        """The table for rich."""
        from rich import box
        from rich.table import Table as RichTable

        table = RichTable(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, column in enumerate(self.columns):
            numbers = all(not isinstance(row[index], str) for row in self.rows)
            table.add_column(column, justify="right" if numbers else "left")
        for row in self.rows:
            table.add_row(*(shown(cell) for cell in row))
        return table


_COLUMN = re.compile(r"(?:(.*): )?(.*?)(?: \* (\S+))?")


def rows_table(title: str, columns: str, rows: Iterable[Any]) -> Table:
    """A table of mappings. columns: divided by ` | `, each `TITLE: KEY`, or KEY alone. Cells of `KEY * 1e3` are scaled;
    a row may lack a key.
    """
    wanted = [match.groups() for each in columns.split(" | ") if (match := _COLUMN.fullmatch(each))]
    table = Table(title, [key if heading is None else heading for heading, key, _ in wanted])
    for row in rows:
        table.add(*(_scaled(row.get(key), scale) for _, key, scale in wanted))
    return table


def _scaled(value: Any, scale: str | None) -> Any:
    return value if scale is None or value is None else value * float(scale)


def shown(value: Any) -> str:
    """A cell's text: three significant digits at least, `-` for None."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
        return f"{value:.{digits}f}"
    return str(value)


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal."""

    name: str
    value: float | None
    """The measured value, the worst of several; None if nothing was measured."""
    mark: float
    at_most: bool = False
    where: str = "-"
    """The case that gave it."""

    @property
    def met(self) -> bool | None:
        if self.value is None:
            return None
        return self.value <= self.mark if self.at_most else self.value >= self.mark

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "value": self.value, "mark": self.mark, "at_most": self.at_most, "met": self.met}


def goal_table(title: str, goals: Iterable[Goal]) -> Table:
    table = Table(title, ["goal", "measured", "mark", "met", "worst at"])
    for goal in goals:
        met = "not measured" if goal.met is None else "met" if goal.met else "MISSED"
        table.add(goal.name, goal.value, f"{'≤' if goal.at_most else '≥'} {goal.mark:g}", met, goal.where)
    return table


def spread(values: Iterable[float], percentiles: Sequence[float] = (50, 90, 99)) -> dict[str, float] | None:
    """Mean, percentiles and extremes; None for an empty list.

    Percentiles interpolate linearly between order statistics, like numpy's default.
    """
    found = values if isinstance(values, np.ndarray) else np.fromiter(values, dtype=np.float64)
    if not len(found):
        return None
    marks = np.percentile(found, percentiles).tolist()
    named = {f"p{percentile:g}": mark for percentile, mark in zip(percentiles, marks, strict=True)}
    return {"mean": float(found.mean()), **named, "min": float(found.min()), "max": float(found.max())}
