"""Arrival rates of adapters, and which replicas should hold them in advance: dLoRA's burst tolerance (§5.1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

MEMORY_SECONDS = 600.0
"""Time constant, in seconds, of the decay of arrivals."""

LEAST = 0.5
"""Count below which an adapter is forgotten: a single arrival, after seven minutes."""


class ArrivalRates:
    """Counts of arrivals that decay exponentially."""

    def __init__(self) -> None:
        self._counts: dict[str, tuple[float, float]] = {}  # counts, as of which time

    def note(self, adapter: str, now: float) -> None:
        self._counts[adapter] = self._at(adapter, now) + 1, now

    def forget(self, adapter: str) -> None:
        self._counts.pop(adapter, None)

    def at(self, now: float) -> dict[str, float]:
        """Requests per second of each adapter."""
        counts = {adapter: self._at(adapter, now) for adapter in self._counts}
        self._counts = {adapter: (count, now) for adapter, count in counts.items() if count >= LEAST}
        return {adapter: count / MEMORY_SECONDS for adapter, (count, _) in self._counts.items()}

    def _at(self, adapter: str, now: float) -> float:
        count, then = self._counts.get(adapter, (0.0, now))
        return count * math.exp((then - now) / MEMORY_SECONDS)


def burst_tolerance(
    rates: Mapping[str, float], pages: Mapping[str, int], num_pages: Sequence[int], kv_share: float = 0.5
) -> list[list[str]]:
    """Return the adapters of each replica.

    The burst tolerance of an adapter is the memory left for KV on the replicas that have it, divided by its arrival
    rate. The adapter with the lowest goes to the replica with most memory left that does not have it, until the minimum
    over all adapters would fall. As in the authors' code (`find_best_lora_weight_schedule`), every adapter is placed
    once before any is placed twice, if it fits. Adapters without arrivals are left out.

    rates: requests per second, or any multiple. pages: of each adapter. num_pages: of each replica. kv_share: share of
    these that stays free of adapters: headroom that the authors' code does not have.
    """
    names = sorted((name for name, rate in rates.items() if rate > 0), key=lambda name: (-rates[name], name))
    rate = np.array([rates[name] for name in names])
    size = np.array([pages[name] for name in names], np.int64)
    free = np.array(num_pages, np.int64)
    least = np.ceil(free * kv_share).astype(np.int64)
    holds = np.zeros((len(names), len(free)), bool)
    memory = np.zeros(len(names))  # free pages of the replicas that have each adapter
    ended = np.zeros(len(names), bool)  # adapters for which no other replica has room
    lowest = 0.0
    while not ended.all():
        index = int(np.where(ended, np.inf, memory / rate).argmin())
        replica = int(np.where(holds[index] | (free - size[index] < least), -1, free).argmax())
        if holds[index, replica] or free[replica] - size[index] < least[replica]:
            ended[index] = True
            continue
        then = memory - size[index] * holds[:, replica]
        then[index] += free[replica] - size[index]
        counted = ~ended | holds.any(axis=1)
        tolerance = float((then / rate)[counted].min())
        if tolerance < lowest:
            break
        memory, lowest = then, tolerance
        holds[index, replica] = True
        free[replica] -= size[index]
    return [[names[index] for index in np.flatnonzero(column)] for column in holds.T]
