"""Log-probabilities in OpenAI's and vLLM's formats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...core.requests.types import TokenLogprobs
from ..text.vocabulary import Vocabulary
from .json_text import sliced

Body = dict[str, Any]

LOWEST = -9999.0
"""Replaces any lower value: JSON has no infinities."""


class LogprobFormat:
    """Formats log-probabilities with token names. Long arrays are made while they are written."""

    def __init__(self, vocabulary: Vocabulary, *, as_token_ids: bool = False) -> None:
        """as_token_ids: name tokens `token_id:5` instead of by their text (vLLM's `return_tokens_as_token_ids`)."""
        self._vocabulary = vocabulary
        self.name = vocabulary.name_of
        self._name = "token_id:{}".format if as_token_ids else vocabulary.name_of

    def is_special(self, token_id: int) -> bool:
        return token_id in self._vocabulary.specials

    def completion(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs | None],
        offsets: Sequence[int],
        count: int,
    ) -> Body:
        """`logprobs` of a completion with `count` alternatives; a prompt's first token has None.

        The token itself is always included, so there may be one more than `count`.
        """
        return {
            "text_offset": list(offsets),
            "token_logprobs": [None if entry is None else _finite(entry.logprob) for entry in logprobs],
            "tokens": [self._name(token) for token in token_ids],
            "top_logprobs": sliced(logprobs, lambda entry: None if entry is None else self.named(entry, count)),
        }

    def named(self, entry: TokenLogprobs, count: int) -> dict[str, float]:
        """A token and its alternatives by their names."""
        named: dict[str, float] = {}
        for token, score in ((entry.token_id, entry.logprob), *entry.top[:count]):
            named.setdefault(self._name(token), _finite(score))  # of equal names, the more likely
        return named

    def chat(self, logprobs: Sequence[TokenLogprobs], count: int) -> Body:
        """`logprobs` of a chat completion with `count` alternatives."""
        return {"content": sliced(logprobs, lambda entry: self._with_top(entry, count)), "refusal": None}

    def _with_top(self, entry: TokenLogprobs, count: int) -> Body:
        top = [self._token(token, score) for token, score in entry.top[:count]]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, score: float) -> Body:
        return {
            "token": self._name(token_id),
            "logprob": _finite(score),
            "bytes": list(self._vocabulary.bytes_of(token_id)),
        }

    def prompt(self, logprobs: Sequence[TokenLogprobs], count: int) -> Any:
        """vLLM's `prompt_logprobs`: token id → logprob, for every token but the first, with their ranks."""
        return sliced([None, *logprobs], lambda entry: None if entry is None else self._by_id(entry, count))

    def _by_id(self, entry: TokenLogprobs, count: int) -> dict[str, Body]:
        ranks = {entry.token_id: entry.rank, **{token: rank for rank, (token, _) in enumerate(entry.top, start=1)}}
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
