"""What a scheduler keeps to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """Budgets of a step and bounds of a request."""

    max_num_seqs: int
    max_num_batched_tokens: int
    chunked_prefill: bool
    max_model_len: int
    block_tokens: int
    eos_token_ids: frozenset[int]
    lookahead: int = 8
    prefetch: int = 0
    max_adapters_per_step: int | None = None
    max_overtake_seconds: float = 1.0
    max_waiting: int | None = None
