"""Tables of results and the marks in them."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from chorus.perf.report.table import Goal, Table, goal_table, shown


def text(table: Table) -> str:
    out = io.StringIO()
    table.show(Console(file=out, width=100))
    return out.getvalue()


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        (None, "-"),
        (True, "yes"),
        (3, "3"),
        ("a", "a"),
        (0.12345, "0.123"),
        (12.345, "12.35"),
        (123.45, "123.5"),
        (1e4, "10000"),
    ],
)
def test_cells_have_three_digits_at_least(value, cell):
    assert shown(value) == cell


def test_a_table_has_a_title_and_a_cell_for_each_column():
    table = Table("speeds", ["case", "tokens/s"])
    table.add("base", 12.5)
    assert [word for word in ("speeds", "base", "mixed") if word in text(table)] == ["speeds", "base"]
    with pytest.raises(ValueError, match="speeds: 1 cells for 2 columns"):
        table.add("mixed")


def test_goals_are_met_missed_or_not_measured():
    goals = [Goal("fast", 2.0, 1.5), Goal("slow", 2.0, 1.5, at_most=True, where="batch 1"), Goal("odd", None, 1.0)]
    assert [goal.met for goal in goals] == [True, False, None]
    lines = {line.split()[0]: line for line in text(goal_table("goals", goals)).splitlines() if line.split()}
    assert "≥ 1.5" in lines["fast"] and " met" in lines["fast"]
    assert "≤ 1.5" in lines["slow"] and "MISSED" in lines["slow"] and "batch 1" in lines["slow"]
    assert "not measured" in lines["odd"]
    assert goals[0].to_json() == {"name": "fast", "value": 2.0, "mark": 1.5, "at_most": False, "met": True}
