"""Amount of work in a step, counted from its plan."""

from __future__ import annotations

from dataclasses import dataclass

from ...graphs.runner import padded
from ..requests.types import StepPlan
from .models import Kernel, StepCost


@dataclass(slots=True)
class StepWork:
    """Counts over a plan's rows.

    tokens: computed tokens, with the padding of a bucket; a step with a prompt has no padding, but with more than 64
    rows it counts at least the padded number of rows, since products are computed in tiles of about an eighth of them,
    and a prompt of few tokens makes no step cheaper. rows: without padding. kv_tokens: tokens in the rows' KV cache
    after the step. longest: most KV tokens of a row before the step. row_ranks, token_ranks: rank-rows computed, once
    per row and once per token. adapter_ranks: sum of the distinct adapters' ranks. pairs: (token, token that it attends
    to) of the ragged rows. ragged: there are rows that compute more than one token.
    """

    tokens: int
    rows: int
    kv_tokens: int
    longest: int
    row_ranks: int
    token_ranks: int
    adapter_ranks: int
    pairs: float = 0.0
    ragged: bool = False

    @classmethod
    def of(cls, plan: StepPlan, kernel: Kernel) -> StepWork:
        """Rows of the merged adapter count as the base model's; the others take its part away and add their own."""
        ranks = [adapter.rank for adapter in plan.adapters]
        merged = plan.merged
        if merged is None:
            return cls._of_rows(plan, ranks, kernel)
        slot = plan.adapters.index(merged) if merged in plan.adapters else None
        if slot is not None:
            ranks[slot] = 0
        work = cls._of_rows(plan, ranks, kernel)
        if apart := [len(row.tokens) for row in plan.rows if row.slot != slot]:
            work.row_ranks += len(apart) * merged.rank
            work.token_ranks += sum(apart) * merged.rank
            work.adapter_ranks += merged.rank
        return work

    @classmethod
    def _of_rows(cls, plan: StepPlan, ranks: list[int], kernel: Kernel) -> StepWork:
        """ranks: of the plan's adapters, 0 for one that is in the weights."""
        rows, tokens = plan.rows, plan.num_tokens
        adapter_ranks = sum(ranks)
        ranks.append(0)  # the base model's slot is the last
        kv_tokens, longest, using, row_ranks = tokens, 0, 0, 0
        for row in rows:
            start = row.start
            kv_tokens += start
            if start > longest:
                longest = start
            if rank := ranks[row.slot]:
                using += 1
                row_ranks += rank
        if plan.bucket is not None:
            work = kernel.rank_work(using, row_ranks, max(ranks)) if using else 0
            return cls(plan.bucket, tokens, kv_tokens, longest, work, work, adapter_ranks)
        pairs, more_using, token_ranks = 0.0, 0, row_ranks
        for row in rows:
            count = len(row.tokens)
            if count == 1:
                break  # chunks come first
            pairs += count * (row.start + (count + 1) / 2)
            if rank := ranks[row.slot]:
                more_using += count - 1
                token_ranks += (count - 1) * rank
        largest = max(ranks)
        if len(rows) > 64:
            tokens = max(tokens, padded(len(rows)))
        return cls(
            tokens, len(rows), kv_tokens, longest, kernel.rank_work(using, row_ranks, largest),
            kernel.rank_work(using + more_using, token_ranks, largest), adapter_ranks, pairs, True,
        )  # fmt: skip

    def seconds(self, cost: StepCost) -> float:
        """Of the executor; the engine's overhead comes on top."""
        return cost.seconds(
            self.tokens, self.rows, self.kv_tokens, self.longest, self.row_ranks, self.token_ranks, self.adapter_ranks,
            self.pairs, self.ragged,
        )  # fmt: skip


STEP_TERMS = (
    "base", "ragged", "per_token", "per_row", "per_padding", "per_kv_token", "per_pair", "lora", "per_rank",
    "per_token_rank", "per_adapter_rank",
)  # fmt: skip
"""The fitted terms; `weights` follows from the knee, and the LM head's are not separated from the others."""


def term_values(work: StepWork, knee: float = 0.0) -> tuple[float, ...]:
    """Return the factor of each of STEP_TERMS: a row for `fit`.

    knee: tokens up to which reading the weights takes longer than multiplying with them.
    """
    return (
        1.0, float(work.ragged), max(work.tokens, knee), work.rows, 0.0 if work.ragged else work.tokens - work.rows,
        work.kv_tokens, work.pairs, 1.0 if work.adapter_ranks else 0.0, work.row_ranks, work.token_ranks,
        work.adapter_ranks,
    )  # fmt: skip
