"""From a step's logits to its drawn tokens."""

from __future__ import annotations

import torch

from ..ops.sampling import sample, uniform
from .types import ScheduledRow, StepResult


def draw(rows: list[ScheduledRow], logits: torch.Tensor) -> StepResult:
    """Draw a token for every row that asks for one. logits: `[≥ rows, vocab]` float32, row i's at index i.

    A row whose logits are not finite gets an error instead of a token; the others are not touched by it.
    """
    result = StepResult()
    asking = [(i, row) for i, row in enumerate(rows) if row.sampling is not None]
    if not asking:
        return result
    if len(asking) != len(logits):
        logits = logits[[i for i, _ in asking]]
    tokens = _choose([row for _, row in asking], logits)
    finite = logits.amax(-1).isfinite().tolist()  # NaN anywhere makes the maximum NaN
    for (_, row), token, healthy in zip(asking, tokens.tolist(), finite, strict=True):
        if healthy:
            result.tokens[row.request_id] = token
        else:
            result.errors[row.request_id] = "the model produced logits that are not finite"
    return result


def _choose(rows: list[ScheduledRow], logits: torch.Tensor) -> torch.Tensor:
    params = [row.sampling for row in rows]
    if all(p.temperature == 0 for p in params):
        return logits.argmax(-1)
    return sample(
        logits,
        temperature=torch.tensor([p.temperature for p in params]),
        top_k=torch.tensor([min(p.top_k, logits.shape[-1]) for p in params]),
        top_p=torch.tensor([p.top_p for p in params]),
        u=torch.tensor([uniform(row.seed, row.kv_len) for row in rows], dtype=torch.float64),
    )
