"""Baselines: the values that results are compared with, one file per suite, variant and device.

Tests: tests/perf/gate/test_gate.py
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .suite import ELSEWHERE, GateError, Metric, Rule, Suite, find
from .verdict import Verdict, judge

ANY = "any"


@dataclass(frozen=True)
class Run:
    """Results of one suite, variant and device; several count as repeats."""

    suite: Suite
    variant: str
    device: str
    same: dict[str, Any]
    readings: dict[str, tuple[Metric, tuple[float, ...]]]
    commits: tuple[str, ...] = ()
    """Of the results, where the suite says where they name one."""
    taken: str | None = None
    """Day of the first result, where it names one."""

    @classmethod
    def of(cls, suite: Suite, results: Sequence[dict[str, Any]]) -> Run:
        """Raises GateError for results that are not of one load on one device."""
        heads = [_head(suite, result) for result in results]
        if any(head != heads[0] for head in heads):
            other = next(head for head in heads if head != heads[0])
            raise GateError(f"{suite.name}: these results are not repeats of one run: {heads[0]} and {other}")
        readings: dict[str, tuple[Metric, tuple[float, ...]]] = {}
        for result in results:
            for metric, values in suite.readings(result):
                readings[metric.name] = metric, readings.get(metric.name, (metric, ()))[1] + values
        commits = [] if suite.commit is None else [str(find(result, suite.commit)) for result in results]
        days = [] if suite.date is None else [str(find(result, suite.date))[:10] for result in results]
        return cls(suite, *heads[0], readings, tuple(dict.fromkeys(commits)), min(days, default=None))

    @property
    def label(self) -> str:
        return " ".join(filter(None, (self.suite.name, self.variant)))

    def path(self, directory: Path) -> Path:
        """The file of this run's baseline."""
        device = ANY if self.suite.portable else self.device
        name = ".".join(_slug(part) for part in (self.variant, device) if part)
        return directory / self.suite.name / f"{name}.json"


@dataclass(frozen=True)
class Baseline:
    """values: the readings, by the metric's name."""

    path: Path
    device: str
    taken: str
    same: dict[str, Any]
    values: dict[str, list[float]]

    @classmethod
    def find(cls, run: Run, directory: Path) -> Baseline | None:
        """The baseline of a run's suite, variant and device. Raises GateError if it belongs to another load."""
        path = run.path(directory)
        if not path.is_file():
            return None
        try:
            fields = json.loads(path.read_text("utf-8"))
            found = cls(path, fields["device"], fields["taken"], fields["same"], fields["values"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise GateError(f"{path} is not a baseline: {type(error).__name__}: {error}") from None
        for pointer, value in run.same.items():
            if found.same.get(pointer) != value:
                raise GateError(
                    f"{run.label}: {pointer} is {value!r}, in the baseline {path.name} it is "
                    f"{found.same.get(pointer)!r}; run the same load, or take a new baseline with --update"
                )
        return found

    @staticmethod
    def write(run: Run, directory: Path) -> Path:
        """Make a run the baseline. Raises GateError if it lacks a metric."""
        if lacking := [name for name, (_, values) in run.readings.items() if not values]:
            raise GateError(f"{run.label}: the result lacks {', '.join(lacking)}; a baseline needs every metric")
        if len(run.commits) > 1:
            raise GateError(
                f"{run.label}: these results are of the commits {', '.join(run.commits)}; give those of one"
            )
        path = run.path(directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        taken = run.taken or datetime.now(UTC).date().isoformat()
        head: dict[str, Any] = {"suite": run.suite.name, "variant": run.variant, "device": run.device, "taken": taken}
        head |= {"commit": run.commits[0]} if run.commits else {}
        head["same"] = run.same
        lines = [f" {json.dumps(name)}: {json.dumps(value)}" for name, value in head.items()]
        rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, (_, row) in run.readings.items())
        path.write_text("{\n" + ",\n".join(lines) + ',\n "values": {\n' + rows + "\n }\n}\n", "utf-8")
        return path

    @staticmethod
    def devices(run: Run, directory: Path) -> list[str]:
        """Devices that have a baseline of the run's suite."""
        files = sorted((directory / run.suite.name).glob("*.json"))
        return sorted({str(json.loads(file.read_text("utf-8")).get("device")) for file in files})


def compare(run: Run, baseline: Baseline) -> list[Verdict]:
    """A verdict for every metric of either side; a metric that only the baseline has is missing.

    If the baseline belongs to another device, metrics that are local to one are left out, and the others may vary more.
    """
    verdicts = []
    for name, (metric, values) in run.readings.items():
        rule = metric.rule
        if baseline.device != run.device:
            if rule.local:
                continue
            rule = rule.model_copy(update={"floor": rule.floor * ELSEWHERE, "cap": rule.cap * ELSEWHERE})
        verdicts.append(judge(replace(metric, rule=rule), baseline.values.get(name, ()), values))
    gone = {name: values for name, values in baseline.values.items() if name not in run.readings}
    return verdicts + [judge(Metric(name, "same", Rule(kind="exact")), values, ()) for name, values in gone.items()]


def _head(suite: Suite, result: dict[str, Any]) -> tuple[str, str, dict[str, Any]]:
    """(variant, device, values that must be equal) of a result."""
    variant = find(result, suite.variant) if suite.variant else ""
    device = find(result, suite.device) if suite.device else ANY
    for what, pointer, value in (("variant", suite.variant, variant), ("device", suite.device, device)):
        if not isinstance(value, str) or (pointer and not value):
            raise GateError(f"{suite.name}: the result does not name its {what} at {pointer}; it has {value!r} there")
    return variant, device, {pointer: find(result, pointer) for pointer in suite.same}


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
