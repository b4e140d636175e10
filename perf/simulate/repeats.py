"""Decode steps that nothing is decided between run many at once. This makes simulated hours short."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ...core.requests.request import Request
from ...core.requests.types import StepPlan, StepResult
from ...core.scheduling.request_memory import RequestMemory
from ...memory.adapters.adapter import Adapter


@dataclass(slots=True)
class RepeatedPlan(StepPlan):
    """A decode step of all running requests that may run several times, each row going on with the token it drew.

    repeat: steps before the scheduler would decide anything else of itself. until: none of them may begin at or after
    this time, by the engine's clock.
    """

    repeat: int = 1
    until: float = math.inf


@dataclass(slots=True)
class RepeatedResult(StepResult):
    """count: steps that ran, at most the plan's `repeat`; in each of them a row drew its same token."""

    count: int = 1


def most_steps(
    memory: RequestMemory, block_tokens: int, requests: Sequence[Request], steps: int, wanted: Iterable[Adapter]
) -> int:
    """Return how many decode steps of all of `requests` there are pages for, at most `steps`; the first has its own.

    wanted: adapters that keep their pages; they are evicted after all others.
    """
    available = memory.num_available_pages
    available -= sum(len(adapter.pages) for adapter in wanted if adapter.is_idle)
    if len(requests) * -(-steps // block_tokens) <= available:
        return steps
    least = 1
    while least < steps:
        middle = (least + steps + 1) // 2
        if sum(_missing_pages(request, middle - 1) for request in requests) <= available:
            least = middle
        else:
            steps = middle - 1
    return least


def _missing_pages(request: Request, steps: int) -> int:
    """Pages to allocate before a request that is about to compute a token can compute `steps` more."""
    return request.block_table.missing_pages(request.num_computed_tokens + 1 + steps)


def catch_up(memory: RequestMemory, block_tokens: int, requests: Sequence[Request], steps: int) -> None:
    """Do what `steps` decode steps of all of `requests`, then planning one more, would have done to their pages.

    Their tokens are known already; `num_computed_tokens` is the caller's to set. Blocks become known, and others are
    evicted for new ones, in the order of these steps.
    """
    if not memory.use_prefix_cache or not any(request.caching for request in requests):
        if steps > len(requests) * block_tokens:
            for request in requests:
                memory.grow(request, len(request.token_ids))
            return
        while requests := [request for request in requests if request.room < len(request.token_ids)]:
            memory.grow_each(requests)
        return
    starts = [request.num_computed_tokens for request in requests]
    ends = sorted(
        (end, index)
        for index, start in enumerate(starts)
        for end in range(-(start + 1) % block_tokens, steps, block_tokens)  # the steps that complete a block
    )
    for end, group in itertools.groupby(ends, itemgetter(0)):
        indices = [index for _, index in group]
        for index in indices:
            requests[index].num_computed_tokens = starts[index] + end + 1
            memory.remember(requests[index])
        for index in indices:
            memory.grow(requests[index], starts[index] + end + 2)
