"""All sections' results for people: tables, goals, and failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..report.table import Goal, Table, goal_table, rows_table
from .goals import goals
from .models.sizes import is_smoke
from .sections.registry import SECTIONS, section

REPORT = "report.txt"
SMOKE = "smoke run, not a measurement"
_WIDTH = 120


def report(combined: dict[str, Any], path: Path) -> None:
    """Print the tables and write them to `path`. Every table of a run without a GPU says so."""
    from rich.console import Console

    with path.open("w", encoding="utf-8") as file:
        for console in (Console(width=_WIDTH), Console(file=file, width=_WIDTH)):
            for part in _parts(combined):
                if isinstance(part, Table):
                    part.show(console)
                else:
                    console.print(part, highlight=False, markup=False)


def digest(combined: dict[str, Any], path: Path) -> dict[str, Any]:
    """The most important results, short enough for one line; path: where the rest is."""
    measured = not _is_smoke(combined)
    found = {"ok": not combined["failed"] and not combined["missing"], "measurement": measured}
    found |= {"settings": combined["settings"], "device": combined["environment"]["device"].get("name")}
    found |= {"commit": combined["environment"]["commit"], "one_commit": combined["one_commit"]}
    found |= {"done": list(combined["sections"]), "failed": list(combined["failed"]), "missing": combined["missing"]}
    if measured:
        found["goals"] = [goal.to_json() for goal in _goals(combined)]
    return {**found, "seconds": combined["seconds"], "result": str(path)}


def _is_smoke(combined: dict[str, Any]) -> bool:
    return is_smoke(combined["settings"]["device"], combined["settings"]["model"])


def _goals(combined: dict[str, Any]) -> list[Goal]:
    """For a GPU the goals of all sections; for a CPU the sections' own."""
    if combined["settings"]["device"] == "cuda":
        return goals(combined["sections"])
    found = [(section(name), values) for name, values in combined["sections"].items()]
    return [goal for module, values in found if hasattr(module, "goals") for goal in module.goals(values)]


def _parts(combined: dict[str, Any]) -> Iterator[Table | str]:
    smoke = _is_smoke(combined)
    for name in SECTIONS:
        values = combined["sections"].get(name) or combined["partial"].get(name)
        if values is not None:
            made = section(name).tables(values)
            if lost := values.get("not_measured"):
                made.append(rows_table(f"{name}: not measured", "case | because: why", lost))
            for table in made:
                if name in combined["partial"]:
                    table.title += " (incomplete)"
                if smoke:
                    table.title += f" ({SMOKE})"
                yield table
    if not smoke:
        device, model = combined["environment"]["device"].get("name", "CPU"), combined["settings"]["model"]
        of = f"{device}, {model}" if combined["settings"]["device"] == "cuda" else "CPU"
        yield goal_table(f"goals ({of})", _goals(combined))
    yield from _closing(combined, smoke)


def _closing(combined: dict[str, Any], smoke: bool) -> list[str]:
    environment = combined["environment"]
    commit = environment["commit"]
    dirty = {True: " with local changes", False: "", None: " (changes unknown)"}[commit["dirty"]]
    lines = [
        f"device {environment['device'].get('name')}, driver {environment['driver']}, commit {commit['hash']}{dirty}, "
        f"{environment['date']}",
        ", ".join(f"{name} {value}" for name, value in environment["versions"].items()),
    ]
    if not combined["one_commit"]:
        lines.append("the sections were not all measured at one clean commit")
    lines += [f"FAILED {name}: {_why(error)}" for name, error in combined["failed"].items()]
    if combined["missing"]:
        lines.append(f"not run yet: {', '.join(combined['missing'])}; the same command runs them")
    if smoke:
        lines.append(f"device {combined['settings']['device']}: {SMOKE}")
    return lines


def _why(error: str) -> str:
    """The line of a recorded error that names it: the last one of a traceback, else the first, before the log's end."""
    lines = error.strip().splitlines()
    return lines[-1 if lines[0].startswith("Traceback") else 0]
