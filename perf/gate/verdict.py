"""One metric against its baseline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import median
from typing import Any

from .suite import Metric

#: Exact values may differ in the last digits of a printed float.
EXACT = 1e-9

#: Standard deviation of a normal distribution with a median absolute deviation of 1.
_MAD_TO_SIGMA = 1.4826


class Status(StrEnum):
    """Outcome of a comparison with the baseline."""

    OK = "ok"
    BETTER = "better"
    NEW = "new"
    WORSE = "worse"
    CHANGED = "changed"
    MISSING = "missing"

    @property
    def passes(self) -> bool:
        return self in (Status.OK, Status.BETTER, Status.NEW)


@dataclass(frozen=True)
class Verdict:
    """change: of the median, relative to the baseline's; positive is more. allowed: share by which it may be worse."""

    metric: Metric
    status: Status
    baseline: float | None
    result: float | None
    change: float | None = None
    allowed: float = 0.0

    def to_json(self) -> dict[str, Any]:
        change = self.change if self.change is None or math.isfinite(self.change) else None
        return {
            "name": self.metric.name,
            "status": self.status.value,
            "kind": self.metric.rule.kind,
            "better": self.metric.better,
            "baseline": self.baseline,
            "result": self.result,
            "change": change,
            "allowed": self.allowed,
        }


def noise(values: Sequence[float]) -> float:
    """Standard deviation of repeats relative to their median, estimated by the median absolute deviation."""
    middle = median(values)
    if not middle:
        return 0.0
    return _MAD_TO_SIGMA * median(abs(value - middle) for value in values) / abs(middle)


def allowance(metric: Metric, baseline: Sequence[float], result: Sequence[float]) -> float:
    """max(floor, noise · σ), at most the cap, where σ is that of the difference of one repeat of each side."""
    rule = metric.rule
    if rule.kind == "exact":
        return EXACT
    return min(max(rule.floor, rule.noise * math.hypot(noise(baseline), noise(result))), max(rule.cap, rule.floor))


def judge(metric: Metric, baseline: Sequence[float], result: Sequence[float]) -> Verdict:
    """Compare the medians, and every value if values are exact.

    Without values in `baseline` the metric is new; without values in `result`, or with one that is not finite, it is
    missing.
    """
    if not result or not all(map(math.isfinite, result)):
        return Verdict(metric, Status.MISSING, median(baseline) if baseline else None, None)
    if not baseline:
        return Verdict(metric, Status.NEW, None, median(result))
    before = median(baseline)
    exact = metric.rule.kind == "exact"
    now = max(result, key=lambda value: abs(value - before)) if exact else median(result)
    change = _change(before, now)
    allowed = allowance(metric, baseline, result)
    return Verdict(
        metric, _status(metric, change, allowed), baseline=before, result=now, change=change, allowed=allowed
    )


def _change(before: float, now: float) -> float:
    if now == before:
        return 0.0
    return (now - before) / abs(before) if before else math.copysign(math.inf, now)


def _status(metric: Metric, change: float, allowed: float) -> Status:
    if abs(change) <= allowed:
        return Status.OK
    if metric.better == "same":
        return Status.CHANGED
    return Status.WORSE if (change > 0) == (metric.better == "lower") else Status.BETTER
