"""The price of a request, computed before it is queued."""

from __future__ import annotations

from collections.abc import Sequence

from ...core.requests.request_params import InvalidRequest
from ..access.limits import RequestLimits
from ..errors import ApiError
from .openai import GenerationRequest

LEAST_UNASKED = 256
"""A default limit on generated tokens may be reduced to this many, to keep log-probabilities within bounds."""

WORD_CHARACTERS = 16
"""Characters of a bad word that cost as much as a word."""

ALLOWED_TOKENS = 16
"""Allowed tokens that cost as much as a word."""


def check_steering(asked: GenerationRequest, num_choices: int, limits: RequestLimits) -> None:
    """Raises an ApiError if checking each token against the request's words and ids costs too much."""
    words = sum(max(1, len(word) // WORD_CHARACTERS) for word in asked.bad_words)
    counts = {
        "stop": sum(map(len, asked.stop)),
        "bad_words": words,
        "logit_bias": len(asked.logit_bias),
        "allowed_token_ids": len(asked.allowed_token_ids or ()) // ALLOWED_TOKENS,
    }
    if (total := num_choices * sum(counts.values())) > limits.max_steering:
        most = max(counts, key=counts.__getitem__)
        raise ApiError(
            400,
            f"stop strings, bad words, logit_bias and allowed_token_ids of {num_choices} choices cost {total}, this "
            f"server accepts {limits.max_steering} per request; give fewer {most}, or ask for fewer choices",
            param=most,
        )


def unasked_limit(
    asked: GenerationRequest, prompts: Sequence[Sequence[int]], limits: RequestLimits, context: int
) -> int | None:
    """Most generated tokens if the client gives no limit; None if log-probabilities don't limit it.

    Raises InvalidRequest for a request with too many prompt tokens or log-probabilities.
    """
    tokens = _prompt_tokens(asked, prompts, limits)
    of_prompts = 0 if asked.num_prompt_logprobs is None else tokens * (asked.num_prompt_logprobs + 1)
    each = 0 if asked.num_logprobs is None else asked.num_logprobs + 1
    if of_prompts + each == 0:
        return None
    rooms = [max(context - len(prompt), 1) for prompt in prompts]
    asked_tokens = asked.asked_tokens
    lengths = rooms if asked_tokens is None else [min(asked_tokens, room) for room in rooms]
    scores = of_prompts + each * asked.n * sum(lengths)
    if scores <= limits.max_scores:
        return None
    if asked_tokens is None:
        fair = (limits.max_scores - of_prompts) // (each * asked.n * len(prompts)) if each else 0
        if fair >= LEAST_UNASKED:
            return fair
    raise InvalidRequest(
        asked.scores_field,
        f"the response would have up to {scores} log-probabilities, this server returns {limits.max_scores} per "
        "request; ask for fewer alternatives, choices or tokens (max_tokens)",
    )


def _prompt_tokens(asked: GenerationRequest, prompts: Sequence[Sequence[int]], limits: RequestLimits) -> int:
    """Prompt tokens of all choices."""
    tokens = asked.n * sum(map(len, prompts))
    if tokens > limits.max_call_tokens:
        raise InvalidRequest(
            "prompt" if asked.n == 1 else "n",
            f"{len(prompts)} prompts times {asked.n} choices have {tokens} tokens, this server accepts "
            f"{limits.max_call_tokens} per request; send fewer or shorter ones",
        )
    return tokens
