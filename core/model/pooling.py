"""Sums of hidden states for pooling requests.

Tests: tests/core/test_pooling.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..requests.pooling import PooledSum
from ..requests.types import NOT_FINITE, ScheduledSequence, StepResult
from .sampler import following_tokens

STATES_AT_ONCE = 1024
"""Most hidden states that are summed up at once."""


def add_pooled(
    rows: Sequence[ScheduledSequence], states: Callable[[int, int], torch.Tensor], result: StepResult
) -> None:
    """Add the pooled sums of a step to its result.

    states: called with a range of the step's kept tokens, returns their hidden states `[tokens, hidden]` float32.
    """
    begin = sum(len(following_tokens(row)) for row in rows if row.wants_prompt_logprobs)
    pooled = [row for row in rows if len(row.pooled)]
    sums = []
    for row in pooled:
        end = begin + len(row.pooled)
        sums.append(_sum(states, begin, end))
        begin = end
    for row, values in zip(pooled, torch.stack(sums).cpu().numpy() if sums else (), strict=True):
        total = PooledSum(values, len(row.pooled))
        if total.is_finite:
            result.pooled[row.request_id] = total
        else:
            result.errors[row.request_id] = NOT_FINITE


def _sum(states: Callable[[int, int], torch.Tensor], begin: int, end: int) -> torch.Tensor:
    """The sum `[hidden]` float64 of the hidden states of kept tokens."""
    parts = (
        states(start, min(start + STATES_AT_ONCE, end)).double().sum(0) for start in range(begin, end, STATES_AT_ONCE)
    )
    return sum(parts, start=torch.zeros((), dtype=torch.float64))
