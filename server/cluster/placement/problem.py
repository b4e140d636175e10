"""The co-migration problem (dLoRA §5.2): requests with KV and adapters on replicas, and the cost of moving them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

EFFORT_WEIGHT = 1e-3
"""Weight of a second spent on moving, relative to a second of the busiest replica: of two equal plans, the one that
moves less wins.
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """n requests in order of arrival on m replicas, with a adapters.

    A place is an int64 [n]: the replica of each request.

    seconds(place)[j] = busy_seconds[j] + Σ_i (run_seconds[i] + move_seconds[i] if i moved) i at j + Σ_k
    load_seconds[k] k used at j, not resident there + page_seconds · pages at j above num_pages[j] objective(place) =
    max_j seconds(place)[j] + EFFORT_WEIGHT · (seconds of moves and loads)

    The authors relax the limits of memory. Here a replica takes requests and adapters only into `num_pages`; one
    that is above it already gets no fuller.
    """

    home: np.ndarray
    """Int64 [n], the current replica of each request."""
    adapter: np.ndarray
    """Int64 [n]; 0 is the base model, which is resident everywhere."""
    run_seconds: np.ndarray
    move_seconds: np.ndarray
    """Float64 [n]."""
    pages: np.ndarray
    """Int64 [n], of a request's KV."""
    allowed: np.ndarray
    """Bool [n, m], replicas that may run a request; its home always may."""
    busy_seconds: np.ndarray
    """Float64 [m], of requests outside the problem."""
    num_pages: np.ndarray
    """Int64 [m], for KV of the requests, and for adapters that are not resident."""
    num_slots: np.ndarray
    """Int64 [m], requests that can run at once."""
    resident: np.ndarray
    """Bool [a, m], adapters resident on a replica."""
    load_seconds: np.ndarray
    """Float64 [a]."""
    adapter_pages: np.ndarray
    """Int64 [a]."""
    page_seconds: float = 0.0

    @property
    def num_replicas(self) -> int:
        return len(self.busy_seconds)

    def incoming(self, place: np.ndarray) -> np.ndarray:
        """bool [a, m]: adapters that a replica uses but does not have resident."""
        used = np.zeros_like(self.resident)
        used[self.adapter, place] = True
        return used & ~self.resident

    def pages_at(self, place: np.ndarray) -> np.ndarray:
        """int64 [m]."""
        kv = np.bincount(place, self.pages, self.num_replicas).astype(np.int64)
        return kv + self.adapter_pages @ self.incoming(place)

    @property
    def limits(self) -> np.ndarray:
        """int64 [m]: most pages of a plan."""
        return np.maximum(self.num_pages, self.pages_at(self.home))

    def fits(self, place: np.ndarray) -> bool:
        return bool((self.pages_at(place) <= self.limits).all())

    def seconds(self, place: np.ndarray) -> np.ndarray:
        """float64 [m]."""
        each = self.run_seconds + np.where(place != self.home, self.move_seconds, 0.0)
        excess = np.maximum(self.pages_at(place) - self.num_pages, 0)
        return (
            self.busy_seconds
            + np.bincount(place, each, self.num_replicas)
            + self.load_seconds @ self.incoming(place)
            + self.page_seconds * excess
        )

    def objective(self, place: np.ndarray) -> float:
        effort = self.move_seconds[place != self.home].sum() + (self.load_seconds @ self.incoming(place)).sum()
        return float(self.seconds(place).max() + EFFORT_WEIGHT * effort)
