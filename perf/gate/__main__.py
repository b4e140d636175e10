"""Hold results against their baselines: `python -m chorus.perf.gate RESULT…`.

A result is a file whose last line is a JSON object, as the benchmarks print it; `-` is standard input. Which values
count, and by how much they may be worse, is in the TOML files of the baselines' directory. Several results of one load
count as repeats. Exits with 1 for a regression or a missing metric, with 2 for what can't be compared. The last line
is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from .baseline import Baseline, Run, compare
from .suite import GateError, suite_of, suites
from .verdict import Status, Verdict

BASELINES = Path(__file__).parent / "baselines"

#: Tables longer than this show only what is not ok.
_LONG = 40

_STYLES = {
    Status.OK: "", Status.BETTER: "green", Status.NEW: "cyan",
    Status.WORSE: "bold red", Status.CHANGED: "bold red", Status.MISSING: "bold red",
}  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    args = _parse(argv)
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)
    try:
        reports = [_gate(run, args, console) for run in _runs(args)]
    except GateError as error:
        console.print(f"gate: {error}", style="bold red", markup=False, highlight=False)
        print(json.dumps({"ok": False, "error": str(error)}))
        return 2
    ok = all(report["ok"] for report in reports)
    print(json.dumps({"ok": ok, "suites": reports}))
    return 0 if ok else 1


def read_result(path: str) -> dict[str, Any]:
    """The JSON object that a file is, or ends with. Raises GateError."""
    try:
        text = (sys.stdin.read() if path == "-" else Path(path).read_text("utf-8")).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise GateError(f"{path} can't be read: {error}") from None
    for candidate in (text, text.rpartition("\n")[2]):
        try:
            found = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(found, dict):
            return found
    raise GateError(f"{path} does not end with a JSON object; give a file that a benchmark wrote, or its output")


def _runs(args: argparse.Namespace) -> list[Run]:
    """The results by suite, variant and device."""
    known = suites(args.baseline)
    groups: dict[tuple[str, str, str], tuple[Any, list[dict[str, Any]]]] = {}
    for path in args.results:
        result = read_result(path)
        suite = suite_of(result, known, args.suite)
        one = Run.of(suite, [result])
        groups.setdefault((suite.name, one.variant, one.device), (suite, []))[1].append(result)
    return [Run.of(suite, results) for suite, results in groups.values()]


def _gate(run: Run, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    report: dict[str, Any] = {"suite": run.suite.name, "variant": run.variant, "device": run.device}
    if args.update:
        path = Baseline.write(run, args.baseline)
        console.print(f"{run.label}: {len(run.readings)} metrics are the new baseline {path}", highlight=False)
        return {**report, "ok": True, "baseline": str(path), "updated": True}
    baseline = Baseline.find(run, args.baseline)
    if baseline is None:
        devices = ", ".join(Baseline.devices(run, args.baseline)) or "nothing"
        text = f"{run.label}: no baseline for {run.device}, only for {devices}; take one there with --update"
        if not args.skip_unknown:
            raise GateError(text)
        console.print(f"{text}: skipped", highlight=False, markup=False)
        return {**report, "ok": True, "baseline": None}
    verdicts = compare(run, baseline)
    failed = [verdict for verdict in verdicts if not verdict.status.passes]
    shown = verdicts
    if len(verdicts) > _LONG and not args.all:
        shown = [verdict for verdict in verdicts if verdict.status is not Status.OK]
    if shown:
        console.print(_table(run, baseline, shown, len(verdicts) - len(shown)))
    console.print(_conclusion(run, baseline, verdicts, failed), highlight=False, markup=False)
    metrics = [verdict.to_json() for verdict in verdicts]
    return {**report, "ok": not failed, "baseline": str(baseline.path), "metrics": metrics}


def _table(run: Run, baseline: Baseline, shown: Sequence[Verdict], hidden: int) -> Table:
    """Verdicts for people. hidden: how many more are ok."""
    title = f"{run.label} on {run.device}, baseline of {baseline.taken}"
    if baseline.device != run.device:
        title += f" on {baseline.device}"
    grid = Table("metric", title=title, title_justify="left")
    for name in ("baseline", "result", "change", "allowed"):
        grid.add_column(name, justify="right")
    grid.add_column("verdict")
    for verdict in shown:
        sign = {"lower": "+", "higher": "-", "same": "±"}[verdict.metric.better]
        exact = verdict.metric.rule.kind == "exact"
        change = "-" if verdict.change is None else f"{verdict.change:+.1%}" if math.isfinite(verdict.change) else "∞"
        grid.add_row(
            verdict.metric.name, _number(verdict.baseline), _number(verdict.result), change,
            "exact" if exact else f"{sign}{verdict.allowed:.1%}", verdict.status.value, style=_STYLES[verdict.status],
        )  # fmt: skip
    if hidden:
        grid.caption = f"{hidden} more are ok (--all shows them)"
    return grid


def _conclusion(run: Run, baseline: Baseline, verdicts: Sequence[Verdict], failed: Sequence[Verdict]) -> str:
    if not failed:
        better = sum(verdict.status is Status.BETTER for verdict in verdicts)
        hint = f"; {better} better: keep that with --update" if better else ""
        return f"{run.label}: {len(verdicts)} metrics, none worse than the baseline{hint}"
    named = Counter(verdict.status.value for verdict in failed)
    counts = ", ".join(f"{count} {name}" for name, count in sorted(named.items()))
    return f"{run.label}: {counts} of {len(verdicts)} metrics; if that is meant, take a new baseline with --update"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m chorus.perf.gate", description=__doc__.split("\n\n")[0])
    add = parser.add_argument
    add("results", nargs="+", metavar="RESULT", help="file that ends with a JSON object; - is standard input")
    add("--baseline", type=Path, default=BASELINES, metavar="DIR", help="default: the package's own (%(default)s)")
    add("--suite", metavar="NAME", help="which suite the results are of (default: the one that they fit)")
    add("--update", action="store_true", help="make the results the new baseline")
    add("--skip-unknown", action="store_true", help="pass what has no baseline for its device instead of failing")
    add("--all", action="store_true", help="show every metric, however many")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
