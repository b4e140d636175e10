"""Marks that results are held against."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .table import Table


@dataclass(frozen=True, slots=True)
class Goal:
    """One mark. value: what was measured, of several the worst; None when nothing was. where: the case that gave it."""

    name: str
    value: float | None
    mark: float
    at_most: bool = False
    where: str = "-"

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
