"""Amount of work in a step, counted from its plan."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .models import CostModel, Kernel

if TYPE_CHECKING:
    from ..requests.types import StepPlan


@dataclass(slots=True)
class StepWork:
    """Counts over a plan's rows.

    decodes: every row computes one token, padded to a bucket. rows: the bucket then, else the number of rows.
    kv_tokens: tokens in the rows' KV cache once the step has run. pairs: (token, token that it attends to).
    rank_work: rank-rows computed over all tokens. adapter_ranks: sum of the distinct adapters' ranks.
    """

    decodes: bool
    rows: int
    tokens: int
    kv_tokens: int
    pairs: float
    rank_work: int
    adapter_ranks: int

    @classmethod
    def of(cls, plan: StepPlan, kernel: Kernel) -> StepWork:
        rows, tokens = plan.rows, plan.num_tokens
        ranks = [adapter.rank for adapter in plan.adapters]
        adapter_ranks = sum(ranks)
        ranks.append(0)  # the base model's slot is the last
        kv_tokens, using, token_ranks = tokens, 0, 0
        for row in rows:
            kv_tokens += row.start
            if rank := ranks[row.slot]:
                using += 1
                token_ranks += rank
        pairs = kv_tokens  # of a token: those before it, and itself
        if plan.bucket is None:
            for row in rows:
                more = len(row.tokens) - 1
                if more == 0:
                    break  # chunks come first
                pairs += more * (row.start + (more + 1) / 2)
                if rank := ranks[row.slot]:
                    using += more
                    token_ranks += more * rank
        work = kernel.rank_work(using, token_ranks, max(ranks)) if using else 0
        return cls(plan.bucket is not None, plan.bucket or len(rows), tokens, kv_tokens, pairs, work, adapter_ranks)

    def seconds(self, costs: CostModel) -> float:
        """Of the executor; the engine's overhead comes on top."""
        if self.decodes:
            return costs.decode.seconds(self.rows, self.kv_tokens, self.rank_work, self.adapter_ranks)
        return costs.prefill.seconds(
            self.tokens, self.rows, self.pairs, self.rank_work, self.adapter_ranks, self.kv_tokens
        )


DECODE_TERMS = ("base", "per_row", "per_kv_token", "lora", "per_rank", "per_adapter_rank", "per_row_beyond")
PREFILL_TERMS = ("base", "per_token", "per_row", "per_pair", "lora", "per_rank", "per_adapter_rank", "per_kv_token")


def term_values(work: StepWork, knee: float = math.inf) -> tuple[float, ...]:
    """Return the factor of each of DECODE_TERMS, or PREFILL_TERMS: a row for `fit`."""
    lora = 1.0 if work.adapter_ranks else 0.0
    if work.decodes:
        beyond = max(0.0, work.rows - knee)
        return 1.0, work.rows, work.kv_tokens, lora, work.rank_work, work.adapter_ranks, beyond
    return 1.0, work.tokens, work.rows, work.pairs, lora, work.rank_work, work.adapter_ranks, work.kv_tokens
