"""Sums over replicas: counts of present replicas, and what replicas that are gone had counted."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields, replace
from itertools import zip_longest
from typing import Any

from ...core.engine_stats import AccountStats, EngineStats
from ...graphs.runner import StepMode
from .link import Link

_LATEST = ("last_step", "mode", "merged_adapter")
_LARGEST = ("longest_merge_pause", "oldest_read_seconds")
_NOW = frozenset(
    ("num_running", "num_waiting", "num_pages", "num_free_pages", "num_kv_pages", "num_adapter_pages",
     "num_cached_pages", "num_reads", "num_swapped", "swapped_bytes", "num_shadow_pages", *_LATEST, *_LARGEST)
)  # fmt: skip
"""Fields that are not counted up."""

_NAMES = tuple(one.name for one in fields(EngineStats))
NOTHING = EngineStats(
    **{**dict.fromkeys(_NAMES, 0), "last_step": None, "mode": StepMode.LORA, "merged_adapter": None, "step_sizes": ()}
)


def total(stats: Iterable[EngineStats]) -> EngineStats:
    """The sum, as of one engine."""
    result: dict[str, Any] = asdict(NOTHING)
    for one in stats:
        for name in _NAMES:
            value = getattr(one, name)
            if name in _LATEST:
                result[name] = value if value is not None else result[name]
            elif name in _LARGEST:
                result[name] = max(result[name], value)
            elif isinstance(value, tuple):
                result[name] = tuple(map(sum, zip_longest(result[name], value, fillvalue=0)))
            else:
                result[name] += value
    return EngineStats(**result)


def counted(stats: EngineStats) -> EngineStats:
    """What a replica that is gone has counted up: the sum over replicas must not fall."""
    return replace(stats, **{name: getattr(NOTHING, name) for name in _NOW})


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
