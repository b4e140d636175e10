"""The requests that a plan is for: a trace's requests, and what another such time might have brought."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from ..workload.request import TraceRequest
from ..workload.seeds import stream
from ..workload.traces.table import Csv
from .errors import PlanError

NEEDED = ("arrival", "prompt_tokens", "output_tokens")


@dataclass(frozen=True)
class Requests:
    """In order of arrival, from 0 on. ranks: of the adapters that they ask for."""

    items: tuple[TraceRequest, ...]
    ranks: dict[str, int]

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.items[-1].arrival

    def resampled(self, seed: int, scale: float = 1.0) -> Requests:
        """The same for seed 0; otherwise a Poisson bootstrap: each request comes 0, 1, 2 … times, `scale` times on
        average, the first at its time and its copies anywhere before the next request. So the course of the rate,
        the bursts and the mix of tenants and adapters stay, and their numbers vary as another day's would.
        """
        if not seed and scale == 1.0:
            return self
        rng = stream(seed, "requests of a plan")
        counts = rng.poisson(scale, len(self.items))
        found = []
        for one, after, count in zip(self.items, (*self.items[1:], self.items[-1]), counts.tolist(), strict=True):
            gap = after.arrival - one.arrival
            later = one.arrival + gap * np.sort(rng.random(max(0, count - 1)))
            found += [one._replace(arrival=time) for time in (one.arrival, *later.tolist())[:count]]
        return Requests(_numbered(found or list(self.items[:1])), self.ranks)


@lru_cache(maxsize=2)
def load_requests(path: Path, rank: int | None = None) -> Requests:
    """Of a CSV file, sorted by arrival. rank: of adapters of which the trace tells none.

    Raises PlanError, and TraceError for what can't be read.
    """
    source = Csv(format="csv", path=path, sort=True)
    for field in NEEDED:
        source.needs(field, "--trace")
    ranks: dict[str, int] = {}
    found = []
    for row in source.rows():
        if row.adapter is not None:  # it may have been replaced meanwhile
            ranks[row.adapter] = max(row.rank or 0, ranks.get(row.adapter, 0))
        found.append(TraceRequest(0, *row))
    if not found:
        raise PlanError(f"--trace {path}: it has no rows; record some with `chorus serve --record {path}`")
    for name in [name for name, known in ranks.items() if not known]:
        if rank is None:
            raise PlanError(
                f"--trace {path}: rank of adapter {name!r} is empty; fill the column rank, or give --rank N"
            )
        ranks[name] = rank
    start = found[0].arrival
    items = [
        one._replace(arrival=one.arrival - start, rank=0 if one.adapter is None else ranks[one.adapter])
        for one in found
    ]
    return Requests(_numbered(items), ranks)


def _numbered(requests: list[TraceRequest]) -> tuple[TraceRequest, ...]:
    return tuple(one._replace(id=index) for index, one in enumerate(requests))
