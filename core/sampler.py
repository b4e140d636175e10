"""From a step's logits to its drawn tokens."""

from __future__ import annotations

from collections.abc import Collection

import torch

from ..ops.sampling import apply_penalties, greedy, sample, uniform
from .types import ScheduledRow, StepResult, TokenLogprobs

NOT_FINITE = "the model produced logits that are not finite"


def draw(rows: list[ScheduledRow], logits: torch.Tensor, eos_token_ids: Collection[int]) -> StepResult:
    """Draw a token for every row that asks for one.

    logits: `[Σ num_logits or more, vocab]` float32, each row's `num_logits` in turn. A row whose logits are not finite
    gets an error instead of a token; the others are not touched by it.
    """
    result = StepResult()
    asking, last = [], []
    at = 0
    for row in rows:
        if row.scores_prompt:
            _score_prompt(row, logits[at : at + row.num_logits], result)
        at += row.num_logits
        if row.samples:
            asking.append(row)
            last.append(at - 1)
    if not asking:
        return result
    if last != list(range(len(logits))):
        logits = logits[: len(last)] if last == list(range(len(last))) else logits[last]
    tokens, healthy = greedy(logits)
    if any(row.params.temperature != 0 or row.params.reshapes_logits for row in asking):
        tokens = _choose(asking, logits, eos_token_ids).tolist()
    for index, (row, token) in enumerate(zip(asking, tokens, strict=True)):
        if not healthy[index]:
            result.errors[row.request_id] = NOT_FINITE
            continue
        result.tokens[row.request_id] = token
        if row.params.logprobs is not None:
            scores = logits[index : index + 1].log_softmax(-1)
            result.logprobs[row.request_id] = _logprobs(scores, [token], row.params.logprobs)[0]
    return result


def is_greedy(row: ScheduledRow) -> bool:
    """Whether nothing but the largest of the row's logits is asked for."""
    params = row.params
    if row.scores_prompt:
        return False
    return not row.samples or (params.temperature == 0 and not params.reshapes_logits and params.logprobs is None)


def take(rows: list[ScheduledRow], tokens: list[int], healthy: list[int]) -> StepResult:
    """The result of a step of greedy rows. tokens: each row's most likely one; healthy: 0 where it can't be told."""
    result = StepResult()
    for row, token, good in zip(rows, tokens, healthy, strict=False):
        if not row.samples:
            continue
        if good:
            result.tokens[row.request_id] = token
        else:
            result.errors[row.request_id] = NOT_FINITE
    return result


def _choose(rows: list[ScheduledRow], logits: torch.Tensor, eos_token_ids: Collection[int]) -> torch.Tensor:
    params = [row.params for row in rows]
    if any(p.reshapes_logits for p in params):
        logits = logits.clone()
        for row, scores in zip(rows, logits, strict=True):
            if row.params.reshapes_logits:
                _reshape(row, scores, eos_token_ids)
    return sample(
        logits,
        temperature=torch.tensor([p.temperature for p in params]),
        top_k=torch.tensor([min(p.top_k, logits.shape[-1]) for p in params]),
        top_p=torch.tensor([p.top_p for p in params]),
        min_p=torch.tensor([p.min_p for p in params]),
        u=torch.tensor([uniform(row.seed, row.kv_len) for row in rows], dtype=torch.float64),
    )


def _reshape(row: ScheduledRow, scores: torch.Tensor, eos_token_ids: Collection[int]) -> None:
    """Apply to one row's logits `[vocab]`, in place, what depends on its tokens so far."""
    params = row.params
    output = row.token_ids[row.num_prompt_tokens :]
    if len(output) < params.min_tokens:
        scores[[*eos_token_ids, *params.stop_token_ids]] = -torch.inf
    for word in params.bad_words:
        if len(word) == 1 or tuple(output[len(output) - len(word) + 1 :]) == word[:-1]:
            scores[word[-1]] = -torch.inf
    if params.logit_bias:
        ids = torch.tensor(list(params.logit_bias), device=scores.device)
        scores[ids] += torch.tensor(list(params.logit_bias.values()), device=scores.device)
    if params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty:
        apply_penalties(
            scores,
            torch.tensor(row.token_ids, device=scores.device),
            torch.tensor(output, dtype=torch.long, device=scores.device),
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )


def _score_prompt(row: ScheduledRow, logits: torch.Tensor, result: StepResult) -> None:
    """Log-probabilities of the prompt tokens that follow the row's. logits: `[len(tokens), vocab]`."""
    following = row.token_ids[row.start + 1 : min(row.kv_len + 1, row.num_prompt_tokens)]
    scores = logits[: len(following)].log_softmax(-1)
    result.prompt_logprobs[row.request_id] = _logprobs(scores, following, row.params.prompt_logprobs)


def _logprobs(scores: torch.Tensor, token_ids: list[int], count: int) -> list[TokenLogprobs]:
    """scores: log-probabilities `[len(token_ids), vocab]`."""
    own = scores.gather(-1, torch.tensor(token_ids, device=scores.device)[:, None])[:, 0].tolist()
    if count == 0:
        return [TokenLogprobs(token, score) for token, score in zip(token_ids, own, strict=True)]
    top = scores.topk(min(count, scores.shape[-1]), dim=-1)
    return [
        TokenLogprobs(token, score, tuple(zip(ids, values, strict=True)))
        for token, score, ids, values in zip(token_ids, own, top.indices.tolist(), top.values.tolist(), strict=True)
    ]
