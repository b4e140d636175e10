"""Amount of work in a step, counted from its plan."""

from __future__ import annotations

from ...graphs.runner import padded
from ..requests.types import StepPlan
from .models import Kernel, StepWork


def step_work(plan: StepPlan, kernel: Kernel) -> StepWork:
    """Rows of the merged adapter count as the base model's; the others take its part away and add their own."""
    ranks = [adapter.rank for adapter in plan.adapters]
    merged = plan.merged
    if merged is None:
        return _of_sequences(plan, ranks, kernel)
    lora_index = plan.adapters.index(merged) if merged in plan.adapters else None
    if lora_index is not None:
        ranks[lora_index] = 0
    work = _of_sequences(plan, ranks, kernel)
    if apart := [len(sequence.tokens) for sequence in plan.sequences if sequence.lora_index != lora_index]:
        work.row_ranks += len(apart) * merged.rank
        work.token_ranks += sum(apart) * merged.rank
        work.adapter_ranks += merged.rank
    return work


def _of_sequences(plan: StepPlan, ranks: list[int], kernel: Kernel) -> StepWork:
    """ranks: of the plan's adapters, 0 for one that is in the weights."""
    sequences, tokens = plan.sequences, plan.num_tokens
    adapter_ranks = sum(ranks)
    ranks.append(0)  # the base model's slot is the last
    kv_tokens, longest, using, row_ranks = tokens, 0, 0, 0
    for sequence in sequences:
        start = sequence.start
        kv_tokens += start
        if start > longest:
            longest = start
        if rank := ranks[sequence.lora_index]:
            using += 1
            row_ranks += rank
    if plan.bucket is not None and not plan.num_drafts:
        work = kernel.rank_work(using, row_ranks, max(ranks)) if using else 0
        return StepWork(plan.bucket, tokens, kv_tokens, longest, work, token_ranks=work, adapter_ranks=adapter_ranks)
    pairs, more_using, token_ranks = 0.0, 0, row_ranks
    for sequence in sequences:
        count = len(sequence.tokens)
        if count == 1:
            break  # chunks come first
        pairs += count * (sequence.start + (count + 1) / 2)
        if rank := ranks[sequence.lora_index]:
            count -= sequence.num_base_tokens
            more_using += count - 1
            token_ranks += (count - 1) * rank
    largest = max(ranks)
    if len(sequences) > 64:
        tokens = max(tokens, padded(len(sequences)))
    return StepWork(
        tokens,
        len(sequences),
        kv_tokens,
        longest,
        kernel.rank_work(using, row_ranks, largest),
        token_ranks=kernel.rank_work(using + more_using, token_ranks, largest),
        adapter_ranks=adapter_ranks,
        pairs=pairs,
        ragged=True,
    )


STEP_TERMS = (
    "base",
    "ragged",
    "per_token",
    "per_row",
    "per_padding",
    "per_kv_token",
    "per_pair",
    "lora",
    "per_rank",
    "per_token_rank",
    "per_adapter_rank",
)
"""The fitted terms; `weights` follows from the knee, and the LM head's are not separated from the others."""


def term_values(work: StepWork, knee: float = 0.0) -> tuple[float, ...]:
    """Return the factor of each of STEP_TERMS: a row for `fit`.

    knee: tokens up to which reading the weights takes longer than multiplying with them.
    """
    return (
        1.0,
        float(work.ragged),
        max(work.tokens, knee),
        work.rows,
        0.0 if work.ragged else work.tokens - work.rows,
        work.kv_tokens,
        work.pairs,
        1.0 if work.adapter_ranks else 0.0,
        work.row_ranks,
        work.token_ranks,
        work.adapter_ranks,
    )
