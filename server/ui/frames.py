"""Events of the operator's page: everything that it shows, or the changes since the previous event."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import orjson

from ...core.engine_stats import EngineStats
from ...memory.pages.pool import PageKind
from ..engine.engine_view import Phase, Picture, ReplicaRow
from .usage_rows import Rows, UsageTables

MAX_PAIRS = 1000
"""Most pairs of an adapter and a tenant with their own counts, by number of requests; the rest is one pair."""

OTHERS = ("(others)", "(others)")

MAX_OWNERS = 1 << 15
"""Named owners of pages after which all are numbered anew; the number of an owner without a name is its kind."""

_STATS = (
    "num_running",
    "num_waiting",
    "num_pages",
    "num_free_pages",
    "num_kv_pages",
    "num_adapter_pages",
    "num_cached_pages",
    "num_shadow_pages",
    "num_steps",
    "num_preemptions",
    "num_generated_tokens",
    "num_adapter_hits",
    "num_adapter_loads",
    "num_adapter_evictions",
    "num_reads",
    "num_prefix_hit_tokens",
    "num_prefix_query_tokens",
    "num_host_hit_tokens",
    "num_disk_hit_tokens",
    "host_cached_bytes",
    "disk_bytes",
    "num_swapped",
    "num_merges",
    "num_mode_switches",
    "longest_merge_pause",
    "merged_adapter",
    "mode",
)


@dataclass(slots=True)
class Shown:
    """The contents of one event."""

    owners: np.ndarray
    """Owner of each page, `[pages]` uint32."""
    num_names: int
    """Named owners so far."""
    tables: dict[str, Rows]


class Frames:
    """Encodes one picture after another; used by one thread at a time."""

    def __init__(self, hide: Callable[[str], str] = str, used: UsageTables | None = None) -> None:
        """hide: makes paths in reasons relative. used: makes the tables of what models and tenants have used."""
        self._hide, self._used = hide, used
        self._numbers: dict[tuple[PageKind, str, str], int] = {}
        self._last: Shown | None = None

    def forget(self) -> None:
        """Start over: the next event has no predecessor."""
        self._numbers.clear()
        self._last = None

    def encode(
        self, picture: Picture, stats: EngineStats, facts: Mapping[str, Any], whole: Mapping[str, Any] | None
    ) -> tuple[bytes, bytes]:
        """The event with the changes, and the one with everything; both have everything if there is no predecessor.

        facts: further members of both. whole: further members of the latter; None: the latter is not needed, and empty.
        """
        if len(self._numbers) > MAX_OWNERS:
            self.forget()
        last, shown = self._last, self._show(picture)
        self._last = shown
        facts = {**facts, "stats": counts(stats), "replicas": [replica(one) for one in picture.replicas]}
        everything = b""
        if whole is not None or last is None or last.owners.shape != shown.owners.shape:
            rows = {name: list(table.values()) for name, table in shown.tables.items()}
            pages = {"pages": runs(shown.owners), "owners": self._owners(0)}
            everything = event("snapshot", {**pages, **rows, **facts, **(whole or {})})
        if last is None or last.owners.shape != shown.owners.shape:
            return everything, everything
        return event("delta", {**self._changed(last, shown), **facts}), everything

    def _changed(self, last: Shown, shown: Shown) -> dict[str, Any]:
        changed = {"pages": changes(last.owners, shown.owners).tolist(), "owners": self._owners(last.num_names)}
        for name, table in shown.tables.items():
            before = last.tables[name]
            changed[name] = [row for key, row in table.items() if before.get(key) != row]
            changed[f"gone_{name}"] = [key for key in before if key not in table]
        return {name: value for name, value in changed.items() if value}

    def _show(self, picture: Picture) -> Shown:
        owners = np.frombuffer(picture.kinds, np.uint8).astype(np.uint32)
        held, numbers = picture.holdings, self._numbers
        names = [numbers.setdefault(one[:3], len(PageKind) + len(numbers)) for one in held]
        pages = np.fromiter(chain.from_iterable(one.pages for one in held), np.intp)
        owners[pages] = np.repeat(np.array(names, np.uint32), [len(one.pages) for one in held])
        tables: dict[str, Rows] = {
            "adapters": {row[0]: row for row in picture.adapters()},
            "requests": pairs(picture.phases),
            "quarantined": {one.name: (one.name, self._hide(one.reason)) for one in picture.quarantined},
            "prefixes": {one.name: one for one in picture.prefixes()},
        }
        if self._used is not None:
            tables |= self._used(picture.costs())
        return Shown(owners, len(self._numbers), tables)

    def _owners(self, first: int) -> list[tuple[Any, ...]]:
        """Named owners from number `first` on: number, kind, adapter, tenant."""
        return [(number, *key) for key, number in islice(self._numbers.items(), first, None)]


def replica(one: ReplicaRow) -> tuple[Any, ...]:
    return one.name, one.state, one.stats and counts(one.stats)


def counts(stats: EngineStats) -> dict[str, Any]:
    return {name.removeprefix("num_"): getattr(stats, name) for name in _STATS}


def pairs(phases: Mapping[tuple[str, str, Phase], int]) -> Rows:
    """Numbers of running, waiting and descheduled requests by adapter and tenant."""
    totals: Counter[tuple[str, str]] = Counter()
    for (adapter, tenant, _), count in phases.items():
        totals[adapter, tenant] += count
    kept = totals if len(totals) <= MAX_PAIRS else dict(totals.most_common(MAX_PAIRS))
    found: dict[tuple[str, str], list[Any]] = {}
    for (adapter, tenant, phase), count in phases.items():
        pair = (adapter, tenant) if (adapter, tenant) in kept else OTHERS
        found.setdefault(pair, [*pair, 0, 0, 0])[2 + _ORDER.index(phase)] += count
    return found  # pyright: ignore[reportReturnType] - its lists are sequences


_ORDER = (Phase.RUNNING, Phase.WAITING, Phase.PAUSED)


def runs(values: np.ndarray) -> np.ndarray:
    """Run-length encoding: value, count, value, count and so on."""
    if not len(values):
        return values
    starts = np.concatenate(([0], np.flatnonzero(values[1:] != values[:-1]) + 1))
    return np.stack((values[starts], np.diff(starts, append=len(values))), axis=1).ravel()


def changes(before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """Runs of equal values that have changed: number of pages since the previous run, count, value."""
    changed = np.flatnonzero(before != after)
    if not len(changed):
        return changed
    values = after[changed]
    breaks = np.flatnonzero((np.diff(changed) != 1) | (values[1:] != values[:-1])) + 1
    first = np.concatenate(([0], breaks))
    lengths = np.diff(first, append=len(changed))
    starts = changed[first]
    gaps = np.diff(np.concatenate(([0], starts))) - np.concatenate(([0], lengths[:-1]))
    return np.stack((gaps, lengths, values[first]), axis=1).ravel()


def event(name: str, body: dict[str, Any]) -> bytes:
    """An event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(body, list, orjson.OPT_SERIALIZE_NUMPY))
