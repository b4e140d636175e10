"""Compare results with their baselines: `python -m chorus.perf.gate RESULT…`.

A result is a file with a JSON object as its last line, as the benchmarks print it. The TOML files of the baselines'
directory say which values count, and by how much they may be worse. Several results of one load count as repeats. Exits
with 1 for a regression or a missing metric, and with 2 if something can't be compared. The text ends with a line for
each metric that does not pass; the last line of all is one JSON object.

Tests: tests/perf/gate/test_gate.py
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..report.command import conclude, parser
from ..report.table import Table
from .baseline import Baseline, Run, compare
from .suite import GateError, suite_of, suites
from .verdict import Status, Verdict

BASELINES = Path(__file__).parent / "baselines"

#: Longer tables show only the rows that are not ok.
_LONG = 40


def main(argv: list[str] | None = None) -> int:
    command = parser(__spec__, __doc__)
    add = command.add_argument
    add("results", nargs="+", metavar="RESULT", help="file that ends with a JSON object")
    add("--baseline", type=Path, default=BASELINES, metavar="DIR", help="the baselines")
    add("--update", action="store_true", help="make the results the new baseline")
    add("--write-missing", action="store_true", help="make results without a baseline for their device the baseline")
    add("--skip-unknown", action="store_true", help="pass results without a baseline for their device")
    args = command.parse_args(argv)
    try:
        reports = [_gate(run, args) for run in _runs(args)]
    except GateError as error:
        print(f"gate: {error}")
        conclude({"ok": False, "error": str(error)}, ok=False)
        return 2
    for report in reports:
        for metric in report.get("metrics", ()):
            if not Status(metric["status"]).passes:
                values = f"{metric['result']}, baseline {metric['baseline']}, allowed {metric['allowed']:.0%}"
                print(f"{metric['status']}: {report['suite']} on {report['device']}: {metric['name']}: {values}")
    ok = all(report["ok"] for report in reports)
    return conclude({"ok": ok, "suites": reports}, ok)


def read_result(path: str) -> dict[str, Any]:
    """The JSON object that a file consists of, or ends with. Raises GateError."""
    try:
        text = Path(path).read_text("utf-8").strip()
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
        suite = suite_of(result, known)
        one = Run.of(suite, [result])
        groups.setdefault((suite.name, one.variant, one.device), (suite, []))[1].append(result)
    return [Run.of(suite, results) for suite, results in groups.values()]


def _gate(run: Run, args: argparse.Namespace) -> dict[str, Any]:
    report: dict[str, Any] = {"suite": run.suite.name, "variant": run.variant, "device": run.device}
    if args.update:
        path = Baseline.write(run, args.baseline)
        print(f"{run.label}: {len(run.readings)} metrics are the new baseline {path}")
        return {**report, "ok": True, "baseline": str(path), "updated": True}
    baseline = Baseline.find(run, args.baseline)
    if baseline is None and args.write_missing:
        path = Baseline.write(run, args.baseline)
        print(f"{run.label}: first run on {run.device}: {len(run.readings)} metrics are its baseline; commit {path}")
        return {**report, "ok": True, "baseline": str(path), "updated": True}
    if baseline is None:
        devices = ", ".join(Baseline.devices(run, args.baseline)) or "nothing"
        text = f"{run.label}: no baseline for {run.device}, only for {devices}; first run: write one with --update"
        if not args.skip_unknown:
            raise GateError(text)
        print(f"{text}: skipped")
        return {**report, "ok": True, "baseline": None}
    verdicts = compare(run, baseline)
    _show(run, baseline, verdicts)
    ok = all(verdict.status.passes for verdict in verdicts)
    return {**report, "ok": ok, "baseline": str(baseline.path), "metrics": [each.to_json() for each in verdicts]}


def _show(run: Run, baseline: Baseline, verdicts: Sequence[Verdict]) -> None:
    """Print everything, or of many verdicts those that are not ok, and the totals."""
    title = f"{run.label} on {run.device}, baseline of {baseline.taken} on {baseline.device}"
    table = Table(title, ["metric", "baseline", "result", "change", "allowed", "verdict"])
    for verdict in verdicts:
        if len(verdicts) <= _LONG or verdict.status is not Status.OK:
            sign = {"lower": "+", "higher": "-", "same": "±"}[verdict.metric.better]
            allowed = "exact" if verdict.metric.rule.kind == "exact" else f"{sign}{verdict.allowed:.1%}"
            change = "-" if verdict.change is None else f"{verdict.change:+.1%}"
            values = (verdict.baseline, verdict.result)
            values = ("-" if value is None else f"{value:.6g}" for value in values)
            table.add(verdict.metric.name, *values, change, allowed, verdict.status.value)
    if table.rows:
        table.show()
    counts = Counter(verdict.status for verdict in verdicts)
    worse = ", ".join(f"{count} {status.value}" for status, count in sorted(counts.items()) if not status.passes)
    if worse:
        text = f"{worse} of {len(verdicts)} metrics; if that is meant, take a new baseline with --update"
    else:
        better = f"; {counts[Status.BETTER]} better: keep that with --update" if counts[Status.BETTER] else ""
        text = f"{len(verdicts)} metrics, none worse than the baseline{better}"
    print(f"{run.label}: {text}")


if __name__ == "__main__":
    sys.exit(main())
