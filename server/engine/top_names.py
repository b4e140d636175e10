"""Bounds the series of a metric: names with much traffic have series of their own, all others share one.

Tests: tests/server/engine/test_top_names.py
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping

import numpy as np

OTHER = "other"
"""The label of all names without a series of their own; an adapter of this name is one of them."""

HALF_LIFE_SECONDS = 3600.0
"""Traffic counts half after so long."""

CHALLENGE = 2.0
"""A name takes the series of another one if it has so many times its traffic: two equals would swap at each scrape."""


class TopNames:
    """The names that have series of their own: all, while they are at most `most`; else those with most traffic."""

    def __init__(self, most: int, always: Iterable[str] = (), clock: Callable[[], float] = time.monotonic) -> None:
        """always: names that have a series whatever their traffic, in addition to the `most`."""
        self._most, self._always, self._clock = most, frozenset(always), clock
        self._shown: set[str] = set()
        self._counted: dict[str, float] = {}  # cumulative traffic at the latest choice
        self._recent: dict[str, float] = {}
        self._chosen_at = clock()
        self._lock = threading.Lock()

    @property
    def shown(self) -> frozenset[str]:
        with self._lock:
            return self._always | self._shown

    def choose(self, traffic: Mapping[str, float]) -> None:
        """Choose anew. traffic: all names, with what has been counted for each since the start."""
        with self._lock:
            now = self._clock()
            fade = 0.5 ** ((now - self._chosen_at) / HALF_LIFE_SECONDS)
            self._chosen_at = now
            names = traffic.keys() - self._always - {OTHER}
            self._recent = {
                name: self._recent.get(name, 0.0) * fade + traffic[name] - self._counted.get(name, 0.0)
                for name in names
            }
            self._counted = {name: traffic[name] for name in names}
            self._shown &= names
            by_traffic = sorted(names - self._shown, key=lambda name: (-self._recent[name], name))
            free = self._most - len(self._shown)
            self._shown.update(by_traffic[:free])
            weakest = sorted(self._shown, key=lambda name: (self._recent[name], name))
            for challenger, incumbent in zip(by_traffic[free:], weakest, strict=False):
                if self._recent[challenger] <= CHALLENGE * self._recent[incumbent]:
                    break
                self._shown.remove(incumbent)
                self._shown.add(challenger)

    def fill(self, names: Collection[str]) -> None:
        """Give free series to names without traffic, such as adapters that were loaded and not asked yet."""
        with self._lock:
            free = self._most - len(self._shown)
            self._shown.update(sorted(set(names) - self._shown - self._always - {OTHER})[: max(free, 0)])


class Split:
    """Splits counts by name into those with series and `OTHER`'s: they always add up to all, and no series falls.

    A name that gets a series begins there at 0, as what it counted before stays in `OTHER`; one that loses its series
    adds to `OTHER` what the series had.
    """

    def __init__(self, names: TopNames) -> None:
        self._names = names
        self._base: dict[str, np.ndarray] = {}  # what a shown name had counted before it had a series
        self._last: dict[str, np.ndarray] = {}
        self._lock = threading.Lock()

    def of(self, counts: Mapping[str, np.ndarray], total: np.ndarray) -> dict[str, np.ndarray]:
        """The series. counts: by name. total: of all names, also of those that are no longer in `counts`."""
        with self._lock:
            shown = [name for name in counts if name in self._names.shown]
            self._base = {
                name: self._base[name] if name in self._base else self._last.get(name, np.zeros_like(total))
                for name in shown
            }
            self._last = {name: row for name, row in counts.items() if name not in self._base}
            series = {name: counts[name] - self._base[name] for name in sorted(shown)}
            rest = total - sum(series.values(), np.zeros_like(total))
            if rest.any():
                series[OTHER] = rest
            return series
