"""The requests of a plan: a trace's requests, resampled variants of them, and their SLO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from ...core.costs.models import CostModel
from ..workload.fields import WorkloadError
from ..workload.request import TraceRequest
from ..workload.seeds import stream
from ..workload.trace import Csv

NEEDED = ("arrival", "prompt_tokens", "output_tokens")


class PlanError(WorkloadError):
    """A plan can't be made; the text names the field, the value and the fix."""


@dataclass(frozen=True)
class Requests:
    """Requests in order of arrival, from time 0."""

    items: tuple[TraceRequest, ...]
    ranks: dict[str, int]
    """Ranks of the adapters that they use."""

    @property
    def span(self) -> float:
        """Seconds from the first arrival to the last."""
        return self.items[-1].arrival

    def resampled(self, seed: int, scale: float = 1.0) -> Requests:
        """The same for seed 0; otherwise a Poisson bootstrap: each request comes 0, 1, 2 … times, `scale` times on
        average, the first at its time and its copies anywhere before the next request. So the course of the rate, the
        bursts and the mix of tenants and adapters stay, and their numbers vary like those of another day.
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
    """Requests from a CSV file, sorted by arrival. rank: of adapters without one in the trace.

    Raises PlanError, and TraceError if the file can't be read.
    """
    source = Csv(format="csv", path=path, sort=True)
    for field in NEEDED:
        source.needs(field, "--trace")
    found = [TraceRequest(0, *row) for row in source.rows()]  # pyright: ignore[reportArgumentType] `needs` has checked
    ranks: dict[str, int] = {}
    for one in found:
        if one.adapter is not None:  # it may have been replaced meanwhile
            ranks[one.adapter] = max(one.rank or 0, ranks.get(one.adapter, 0))
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


@dataclass(frozen=True, slots=True)
class Slo:
    """ttft: seconds to first token. tpot: mean seconds per later token. attainment: share of the requests that must
    meet both; a failed request meets neither.
    """

    ttft: float = math.inf
    tpot: float = math.inf
    attainment: float = 0.99

    def check(self, requests: Requests, costs: CostModel) -> None:
        """Raise PlanError if too many requests miss it even alone, with their adapters loaded."""

        @cache
        def alone(prompt: int, output: int, rank: int) -> tuple[float, float]:
            first = costs.prefill_seconds(prompt, rank) + costs.overhead.seconds(1, 1)
            return first, costs.decode_seconds([rank], kv := prompt + output // 2, kv) + costs.overhead.seconds(1)

        for index, (flag, limit) in enumerate((("--slo-ttft", self.ttft), ("--slo-tpot", self.tpot))):
            asked = [one for one in requests.items if index == 0 or one.output_tokens > 1]
            taken = [alone(one.prompt_tokens, one.output_tokens, one.rank or 0)[index] for one in asked]
            late = sorted((seconds, one) for seconds, one in zip(taken, asked, strict=True) if seconds > limit)
            if len(late) > (1 - self.attainment) * len(requests.items):
                seconds, one = late[len(late) // 2]
                raise PlanError(
                    f"{flag} is {_ms(limit)}, and {len(late) / len(requests.items):.1%} of the requests take longer "
                    f"even alone on a replica. One with {one.prompt_tokens} prompt and {one.output_tokens} output "
                    f"tokens and rank {one.rank or 0} takes {_ms(seconds)}{' a token' if index else ''}; raise {flag}, "
                    f"lower --attainment ({self.attainment:g}), or take a faster GPU"
                )


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
