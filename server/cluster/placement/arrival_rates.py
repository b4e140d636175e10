"""How often requests for each adapter arrive."""

from __future__ import annotations

import math

MEMORY_SECONDS = 600.0
"""Time constant with which arrivals are forgotten."""

LEAST = 0.5
"""Arrivals below which an adapter is forgotten: a single one, after seven minutes."""


class ArrivalRates:
    """Counts of arrivals that decay exponentially."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # arrivals, as of when

    def note(self, adapter: str, now: float) -> None:
        self._counts[adapter] = self._at(adapter, now) + 1, now

    def forget(self, adapter: str) -> None:
        self._counts.pop(adapter, None)

    def at(self, now: float) -> dict[str, float]:
        """Requests a second of each adapter."""
        counts = {adapter: self._at(adapter, now) for adapter in self._counts}
        self._counts = {adapter: (count, now) for adapter, count in counts.items() if count >= LEAST}
        return {adapter: count / MEMORY_SECONDS for adapter, (count, _) in self._counts.items()}

    def _at(self, adapter: str, now: float) -> float:
        count, then = self._counts.get(adapter, (0.0, now))
        return count * math.exp((then - now) / MEMORY_SECONDS)
