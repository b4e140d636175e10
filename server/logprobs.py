"""Log-probabilities in the shapes that OpenAI's and vLLM's clients know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..core.types import TokenLogprobs
from .vocabulary import Vocabulary

Body = dict[str, Any]

LOWEST = -9999.0
"""Stands for anything below it: JSON has no infinities."""


class LogprobFormat:
    """Writes log-probabilities with token names."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
        count: int,
    ) -> Body:
        """`logprobs` of a completion with `count` alternatives; a prompt's first token has None.

        The token itself is always among its alternatives, so that there may be one more.
        """
        name = self._vocabulary.name_of
        return {
            "text_offset": list(offsets),
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
            "tokens": [name(token) for token in token_ids],
            "top_logprobs": [None if entry is None else self._named(entry, count) for entry in logprobs],
        }

    def _named(self, entry: TokenLogprobs, count: int) -> dict[str, float]:
        named: dict[str, float] = {}
        for token, score in ((entry.token_id, entry.logprob), *entry.top[:count]):
            named.setdefault(self._vocabulary.name_of(token), _finite(score))  # of equal names the likelier
        return named

    def chat(self, logprobs: Sequence[TokenLogprobs], count: int) -> Body:
        """`logprobs` of a chat completion with `count` alternatives."""
        content = [
            {
                **self._token(entry.token_id, entry.logprob),
                "top_logprobs": [self._token(token, score) for token, score in entry.top[:count]],
            }
            for entry in logprobs
        ]
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, score: float) -> Body:
        vocabulary = self._vocabulary
        return {
            "token": vocabulary.name_of(token_id),
            "logprob": _finite(score),
            "bytes": list(vocabulary.bytes_of(token_id)),
        }

    def prompt(self, logprobs: Sequence[TokenLogprobs], count: int) -> list[dict[str, Body] | None]:
        """vLLM's `prompt_logprobs`: token id → score, for every token but the first; rank is null where unknown."""
        return [None, *(self._by_id(entry, count) for entry in logprobs)]

    def _by_id(self, entry: TokenLogprobs, count: int) -> dict[str, Body]:
        ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
        scores = dict([(entry.token_id, entry.logprob), *entry.top[:count]])
        return {
            str(token): {
                "logprob": _finite(score),
                "rank": ranks.get(token),
                "decoded_token": self._vocabulary.name_of(token),
            }
            for token, score in scores.items()
        }


def _finite(score: float) -> float:
    return score if score > LOWEST else LOWEST
