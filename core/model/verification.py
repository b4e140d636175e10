"""Verification of proposed tokens: which of them a step would have sampled.

Sampling is a function of (seed, position), so a proposed token is accepted exactly if it is the sampled one. The output
is the same with and without proposals, for greedy and for random sampling. (Rejection sampling, as in Leviathan et al.
2023, Algorithm 1, only keeps the distribution.)

Tests: tests/core/model/test_verification.py.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..requests.types import ScheduledSequence, StepPlan, StepResult


def rows_with_logits(plan: StepPlan) -> list[ScheduledSequence]:
    """The sequences that a step has logits for, in order. Each draft is a sequence of its own."""
    return positions_of(plan) if plan.num_drafts else plan.sequences


def positions_of(plan: StepPlan) -> list[ScheduledSequence]:
    """The sequences of a step with drafts, with each position that has logits as a sequence of its own.

    Position i of a sequence with drafts ends with its draft i; position 0 ends with its last known token and keeps the
    request's id. The other ids occur once in the step.
    """
    taken = {sequence.request_id for sequence in plan.sequences}
    rows: list[ScheduledSequence] = []
    for sequence in plan.sequences:
        if not sequence.drafts:
            rows.append(sequence)
            continue
        known = len(sequence.tokens) - sequence.drafts
        for count in range(sequence.drafts + 1):
            request_id = sequence.request_id
            if count:
                request_id = f"{request_id} after {count} drafts"
                while request_id in taken:
                    request_id += "'"
                taken.add(request_id)
            rows.append(_position(sequence, request_id, sequence.tokens[: known + count]))
    return rows


def _position(sequence: ScheduledSequence, request_id: str, tokens: list[int]) -> ScheduledSequence:
    """The same sequence with other tokens and no drafts. `dataclasses.replace` would take many times as long."""
    return ScheduledSequence(
        request_id=request_id,
        lora_index=sequence.lora_index,
        tokens=tokens,
        start=sequence.start,
        pages=sequence.pages,
        params=sequence.params,
        seed=sequence.seed,
        samples=sequence.samples,
        token_ids=sequence.token_ids,
        num_prompt_tokens=sequence.num_prompt_tokens,
        state=sequence.state,
        states=sequence.states,
        state_step=sequence.state_step,
        lora_from=sequence.lora_from,
    )


def accept_drafts(plan: StepPlan, rows: Sequence[ScheduledSequence], result: StepResult) -> None:
    """Move the results of positions after accepted drafts to `StepResult.after_drafts`; drop those after rejected ones.

    rows: of `positions_of`, which `result` was sampled for. A draft is accepted if the one before it was, and it is the
    token that was sampled there. A position that failed ends its sequence's accepted drafts: the next step finds the
    error.
    """
    at = 0
    for sequence in plan.sequences:
        drafts = sequence.tokens[len(sequence.tokens) - sequence.drafts :]
        sampled = result.tokens.get(sequence.request_id)
        for count, draft in enumerate(drafts):
            place = rows[at + 1 + count].request_id
            token, logprobs = result.tokens.pop(place, None), result.logprobs.pop(place, None)
            result.errors.pop(place, None)
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
