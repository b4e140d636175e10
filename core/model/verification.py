"""Verification of proposed tokens: which of them a step would have sampled.

Sampling is a function of (seed, position), so a proposed token is accepted exactly if it is the sampled one. The output
is the same with and without proposals, for greedy and for random sampling. (Rejection sampling, as in Leviathan et al.
2023, Algorithm 1, only keeps the distribution.)

Tests: tests/core/model/test_verification.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..requests.types import ScheduledSequence, StepPlan, StepResult


def accept_drafts(plan: StepPlan, rows: Sequence[ScheduledSequence], result: StepResult) -> None:
    """Move the results of positions after accepted drafts to `StepResult.after_drafts`; drop those after rejected ones.

    rows: of `StepPlan.rows_with_logits`, which `result` was sampled for. A draft is accepted if the one before it was,
    and it is the token that was sampled there. A position that failed ends its sequence's accepted drafts: the next
    step finds the error.
    """
    at = 0
    for sequence in plan.sequences:
        drafts = sequence.tokens[len(sequence.tokens) - sequence.drafts :]
        sampled = result.tokens.get(sequence.request_id)
        for count, draft in enumerate(drafts):
            row_id = rows[at + 1 + count].request_id
            token, logprobs = result.tokens.pop(row_id, None), result.logprobs.pop(row_id, None)
            result.errors.pop(row_id, None)
            if sampled != draft or token is None:
                sampled = None
                continue
            if count == len(result.after_drafts):
                result.after_drafts.append(StepResult())
            after = result.after_drafts[count]
            after.tokens[sequence.request_id] = sampled = token
            if logprobs is not None:
                after.logprobs[sequence.request_id] = logprobs
        at += 1 + sequence.drafts
