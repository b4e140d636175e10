"""The requests that a plan is for: a trace's requests, what another such time might have brought, and their SLO."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import numpy as np

from ...core.costs.models import CostModel, StepWork
from ..workload.fields import WorkloadError
from ..workload.request import TraceRequest
from ..workload.seeds import stream
from ..workload.trace import Csv

NEEDED = ("arrival", "prompt_tokens", "output_tokens")


class PlanError(WorkloadError):
    """A plan that can't be made; the text names the field, the value and the fix."""


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
    found = [TraceRequest(0, *row) for row in source.rows()]
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


Parts = dict[str, float]


@dataclass(frozen=True, slots=True)
class Slo:
    """ttft: seconds to the first token. tpot: seconds a token after it, on average. attainment: share of the requests
    that must have both; one that fails has neither.
    """

    ttft: float = math.inf
    tpot: float = math.inf
    attainment: float = 0.99

    def check(self, requests: Requests, costs: CostModel, chunk: int) -> None:
        """PlanError where too many requests miss it even alone, with their adapters loaded. chunk: tokens of a step."""

        @cache
        def alone(prompt: int, output: int, rank: int) -> tuple[Parts, Parts]:
            kv = prompt + output // 2
            return first_token(costs, prompt, rank, chunk), _parts(costs, 1, kv, kv, rank)

        def parts(one: TraceRequest) -> tuple[Parts, Parts]:
            return alone(one.prompt_tokens, one.output_tokens, one.rank or 0)

        for index, (flag, limit) in enumerate((("--slo-ttft", self.ttft), ("--slo-tpot", self.tpot))):
            late = [
                (sum(parts(one)[index].values()), one)
                for one in requests.items
                if (index == 0 or one.output_tokens > 1) and sum(parts(one)[index].values()) > limit
            ]
            if len(late) > (1 - self.attainment) * len(requests.items):
                late.sort(key=lambda each: each[0])
                taken, one = late[len(late) // 2]
                named = ", ".join(f"{_ms(value)} {name}" for name, value in parts(one)[index].items() if value)
                raise PlanError(
                    f"{flag} is {_ms(limit)}, and {len(late) / len(requests.items):.1%} of the requests take longer "
                    f"even alone on a replica. One with {one.prompt_tokens} prompt and {one.output_tokens} output "
                    f"tokens and rank {one.rank or 0} takes {_ms(taken)}{' a token' if index else ''}: {named}; raise "
                    f"{flag}, lower --attainment ({self.attainment:g}), or take a faster GPU"
                )


def first_token(costs: CostModel, prompt: int, rank: int, chunk: int) -> Parts:
    """What a prompt alone takes, step by step of `chunk` tokens."""
    found: Parts = {}
    for start in range(0, prompt, chunk):
        tokens = min(chunk, prompt - start)
        for name, value in _parts(costs, tokens, start + tokens, start, rank, tokens > 1).items():
            found[name] = found.get(name, 0.0) + value
    return found


def _parts(costs: CostModel, tokens: int, kv: int, longest: int, rank: int, ragged: bool = False) -> Parts:
    """Seconds of a step of one row."""
    step = costs.step
    pairs = tokens * (kv - tokens + (tokens + 1) / 2) if ragged else 0.0
    total = step.seconds(StepWork(tokens, 1, kv, longest, rank, tokens * rank, rank, pairs, ragged))
    products = max(step.per_token * tokens, step.weights) + max(step.per_logits, step.head)
    attention = step.per_kv_token * kv + step.per_longest * longest + step.per_pair * pairs
    lora = total - step.seconds(StepWork(tokens, 1, kv, longest, 0, 0, 0, pairs, ragged))
    rest = total - products - attention - lora + costs.overhead.seconds(1, int(ragged))
    return {"products with the weights": products, "attention": attention, "LoRA": lora, "all else of a step": rest}


def _ms(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
