"""Sums over replicas: counts of present replicas, and what replicas that are gone had counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from itertools import zip_longest
from typing import Any

from ...core.engine_stats import METRICS, AccountStats, EngineStats
from .link import Link

_LATEST = ("last_step", "mode", "merged_adapter")
_NAMES = tuple(one.name for one in fields(EngineStats))
NOTHING = EngineStats()


def total(stats: Iterable[EngineStats]) -> EngineStats:
    """The sum, as of one engine."""
    result: dict[str, Any] = asdict(NOTHING)
    for one in stats:
        for name in _NAMES:
            value = getattr(one, name)
            if name in _LATEST:
                result[name] = value if value is not None else result[name]
            elif name in METRICS and METRICS[name].largest:
                result[name] = max(result[name], value)
            elif isinstance(value, tuple):
                result[name] = tuple(map(sum, zip_longest(result[name], value, fillvalue=0)))
            else:
                result[name] += value
    return EngineStats(**result)


def counted(stats: EngineStats) -> EngineStats:
    """What a replica that is gone has counted up: the sum over replicas must not fall."""
    grown = {name: getattr(stats, name) for name, metric in METRICS.items() if metric.grows}
    return EngineStats(**grown, step_sizes=stats.step_sizes)


def with_waiting(stats: EngineStats, count: int) -> EngineStats:
    """The counts with so many more requests that wait."""
    return replace(stats, num_waiting=stats.num_waiting + count)


def accounts(links: Iterable[Link]) -> list[AccountStats]:
    """Tenants, or adapters, with requests in progress on any replica, by number of requests, most first."""
    found: dict[str, AccountStats] = {}
    for link in links:
        for one in link.report.accounts if link.report is not None else ():
            before = found.get(one.name, AccountStats(one.name, 0, 0, 0.0))
            found[one.name] = AccountStats(
                one.name, before.num_running + one.num_running, before.num_waiting + one.num_waiting,
                before.standing + one.standing,
            )  # fmt: skip
    return sorted(found.values(), key=lambda one: one.num_running + one.num_waiting, reverse=True)
