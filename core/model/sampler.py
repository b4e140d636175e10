"""From a step's logits to its drawn tokens."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Protocol

import torch

from ...ops.sampling import Chances, Scores, score_rows, uniform
from ..requests.logit_edits import edited
from ..requests.sampling_params import SamplingParams
from ..requests.types import ScheduledRow, StepResult, TokenLogprobs

NOT_FINITE = "the model produced logits that are not finite"
ALL_BANNED = (
    "every token is banned: allowed_token_ids, bad_words, logit_bias and min_tokens leave none to draw; ask for less"
)


class Sampling(Protocol):
    """Draws and scores rows of logits."""

    def sample(self, logits: torch.Tensor, rows: Sequence[int], chances: Sequence[Chances]) -> list[int]: ...

    def score(
        self, logits: torch.Tensor, rows: Sequence[int], tokens: Sequence[int], counts: Sequence[int]
    ) -> Scores: ...


def _reshapes_logits(params: SamplingParams) -> bool:
    """True if anything but temperature, min_p, top_k and top_p changes the distribution."""
    return bool(
        params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0 or params.logit_bias
        or params.min_tokens or params.bad_words or params.allowed_token_ids is not None
    )  # fmt: skip


def needs_logits(row: ScheduledRow) -> bool:
    """True if more than the largest of the row's logits is asked for."""
    params = row.params
    return row.samples and (params.temperature != 0 or _reshapes_logits(params) or params.logprobs is not None)


def plain_chances(row: ScheduledRow) -> Chances | None:
    """Chances of a row whose token is drawn from the model's logits as they are; else None."""
    if not row.samples or not row.params.temperature or _reshapes_logits(row.params):
        return None
    return _chances(row)


def draw(
    rows: Sequence[ScheduledRow],
    likeliest: Sequence[int],
    logits: torch.Tensor | None,
    at: Mapping[int, int],
    sampling: Sampling,
    eos_token_ids: Collection[int],
    chosen: Collection[int] = (),
) -> StepResult:
    """Draw a token for every row that asks for one.

    likeliest: each row's most likely token, -1 where its logits are not finite: that row gets an error instead of a
    token; the others are not touched by it. logits: `[…, vocab]` float32; at: by its index each row that has one of
    them, and which. The others have their token already, the likeliest or a drawn one, and cost nothing here; so have
    those in `chosen`, whose logits are only scored.
    """
    result = StepResult()
    drawn: list[tuple[int, ScheduledRow]] = []
    left: list[tuple[int, ScheduledRow]] = []
    for index, (row, token) in enumerate(zip(rows, likeliest, strict=False)):
        if not row.samples:
            continue
        if token < 0:
            result.errors[row.request_id] = NOT_FINITE
            continue
        result.tokens[row.request_id] = token
        if index in at:
            drawn.append((at[index], row))
            if index not in chosen and (row.params.temperature or _reshapes_logits(row.params)):
                left.append(drawn[-1])
    if logits is None or not drawn:  # without logits, `at` is empty
        return result
    _choose(left, logits, sampling, eos_token_ids, result)
    scored = [it for it in drawn if it[1].params.logprobs is not None and it[1].request_id in result.tokens]
    if scored:
        tokens = [result.tokens[row.request_id] for _, row in scored]
        counts = [row.params.logprobs or 0 for _, row in scored]
        found = _logprobs(sampling.score(logits, [place for place, _ in scored], tokens, counts), tokens, counts)
        result.logprobs = {row.request_id: it for (_, row), it in zip(scored, found, strict=True)}
    return result


def score_prompts(
    rows: Sequence[ScheduledRow],
    logits: Callable[[int, int], torch.Tensor],
    sampling: Sampling,
    vocab: int,
    result: StepResult,
) -> None:
    """Add the log-probabilities of prompt tokens to a step's result, in slices of bounded memory.

    logits: called with a range of the step's score tokens (see `following_tokens`), gives theirs, until the next call.
    """
    scored = [row for row in rows if row.scores_prompt]
    tokens = [token for row in scored for token in following_tokens(row)]
    counts = [row.params.prompt_logprobs or 0 for row in scored for _ in following_tokens(row)]
    found: list[TokenLogprobs] = []
    step = score_rows(vocab)
    for begin in range(0, len(tokens), step):
        end = min(begin + step, len(tokens))
        part = tokens[begin:end], counts[begin:end]
        found += _logprobs(sampling.score(logits(begin, end), range(end - begin), *part), *part)
    at = 0
    for row in scored:
        count = len(following_tokens(row))
        scores = found[at : at + count]
        at += count
        if any(math.isnan(score.logprob) for score in scores):
            result.tokens.pop(row.request_id, None)
            result.errors[row.request_id] = NOT_FINITE
        else:
            result.prompt_logprobs[row.request_id] = scores


def following_tokens(row: ScheduledRow) -> list[int]:
    """The prompt tokens that follow each of the row's first ones: those that its prompt scores are of."""
    return row.token_ids[row.start + 1 : min(row.kv_len + 1, row.num_prompt_tokens)]


def _choose(
    drawn: Sequence[tuple[int, ScheduledRow]],
    logits: torch.Tensor,
    sampling: Sampling,
    eos_token_ids: Collection[int],
    result: StepResult,
) -> None:
    """Draw tokens of rows that are not simply greedy into the result."""
    if not drawn:
        return
    places = [place for place, _ in drawn]
    chances = [_chances(row) for _, row in drawn]
    reshaped = [it for it in drawn if _reshapes_logits(it[1].params)]
    with edited(logits, reshaped, eos_token_ids) if reshaped else nullcontext():
        tokens = sampling.sample(logits, places, chances)
    for (_, row), token in zip(drawn, tokens, strict=True):
        if token >= 0:
            result.tokens[row.request_id] = token
        else:
            del result.tokens[row.request_id]
            result.errors[row.request_id] = ALL_BANNED


def _chances(row: ScheduledRow) -> Chances:
    params = row.params
    if params.temperature == 0:
        return _GREEDY
    top_k = min(params.top_k, _MOST_TOP_K)
    return Chances(params.temperature, uniform(row.seed, row.kv_len), top_k, params.top_p, params.min_p)


_GREEDY = Chances(0.0, 0.0)
_MOST_TOP_K = 1 << 40  # more than any vocabulary has, and a native integer


def _logprobs(scores: Scores, tokens: Sequence[int], counts: Sequence[int]) -> list[TokenLogprobs]:
    return [
        TokenLogprobs(token, own, tuple(zip(ids[:count], values[:count], strict=True)))
        for token, own, ids, values, count in zip(tokens, scores.own, scores.ids, scores.values, counts, strict=True)
    ]
