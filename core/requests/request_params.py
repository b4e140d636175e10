"""Parameters of a request: the choice of its next token, and its end.

Tests: tests/core/model/test_sampler.py, tests/core/test_engine.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from .grammar import Grammar

Pooling = Literal["last", "mean", "cls"]
"""The hidden states that a vector is made of, after the model's final norm: those of the last token, the mean of all,
or those of the first token.
"""

POOLINGS: tuple[Pooling, ...] = get_args(Pooling)

MAX_LOGPROBS = 100
#: OpenAI takes 300 biases.
MAX_LOGIT_BIASES = 1024
MAX_BAD_WORD_TOKENS = 16384
MAX_ALLOWED_TOKENS = 16384


HEAD = "head"
"""The field of refusals because a model lacks the head that a request needs."""


class InvalidRequest(ValueError):
    """A request that can't be served as asked. `field` names the wrong input, the text says how to fix it."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


class UnknownModel(InvalidRequest):
    """A request of an adapter that is not registered. name: the adapter's."""

    def __init__(self, name: str) -> None:
        super().__init__("model", f"adapter {name!r} is not registered")
        self.name = name


class NotServed(InvalidRequest):
    """A request of an adapter that is in quarantine; the text says why."""


class AdapterPaused(InvalidRequest):
    """A request of an adapter that takes no new ones for now."""

    def __init__(self, name: str) -> None:
        super().__init__("model", f"adapter {name!r} is paused; try again later")


@dataclass(frozen=True, slots=True)
class RequestParams:
    """Applied in this order: grammar, allowed tokens, min_tokens, bad words, logit bias, penalties, temperature, min_p,
    top_k, top_p. A request for which they leave no token to draw ends with an error.

    max_tokens: None means as many as the model's length and the arena allow. temperature: 0 is greedy. top_k: 0 keeps
    all tokens. top_p: nucleus mass in (0, 1]. min_p: drop tokens less likely than min_p times the most likely one.
    presence_penalty, frequency_penalty: subtracted once, or per occurrence, for tokens generated so far (OpenAI).
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output (CTRL).
    logit_bias: added to the logits of token ids. seed: same seed and prompt give the same tokens whatever else is in
    the batch; None counts as 0, see `Seeds`. stop_token_ids: end on any of these in addition to the model's
    end-of-sequence ids. min_tokens: neither kind of end may be drawn before that many tokens. bad_words: token id
    sequences that must not be generated. allowed_token_ids: the only tokens that may be generated, an end of sequence
    among them only if it is listed. grammar: the output matches it; an end of sequence comes only where it may end, and
    ends it despite `ignore_eos`, which lets it come only where nothing else can. logprobs, prompt_logprobs: report
    log-probabilities of generated or prompt tokens with that many alternatives. logprob_token_ids: the alternatives to
    report with generated tokens, instead of the most likely ones; needs `logprobs`. pooling: sample no token, but
    return the vector that it names; `max_tokens` must be 1, and nothing else has an effect. classify: return the scores
    that a head gives the pooled vector: the adapter's head, or the base model's.
    """

    max_tokens: int | None = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    grammar: Grammar | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logprob_token_ids: tuple[int, ...] = ()
    pooling: Pooling | None = None
    classify: bool = False

    def __post_init__(self) -> None:
        most = math.inf if self.max_tokens is None else self.max_tokens
        _require("max_tokens", self.max_tokens, most >= 1, "at least 1, or None for all that fit")
        _require("temperature", self.temperature, 0.0 <= self.temperature <= 100.0, "between 0 and 100")
        _require("top_p", self.top_p, 0.0 < self.top_p <= 1.0, "above 0 and at most 1")
        _require("top_k", self.top_k, self.top_k >= 0, "0 for all tokens, or a positive count")
        _require("min_p", self.min_p, 0.0 <= self.min_p <= 1.0, "between 0 and 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(name, value, -2.0 <= value <= 2.0, "between -2 and 2")
        penalty = self.repetition_penalty
        _require("repetition_penalty", penalty, 0.0 < penalty < math.inf, "a positive number; 1 is neutral")
        _at_most("logit_bias", len(self.logit_bias), MAX_LOGIT_BIASES, "entries")
        for token, bias in self.logit_bias.items():
            _require("logit_bias", {token: bias}, token >= 0 and -100.0 <= bias <= 100.0, "token ids to -100 … 100")
        _require("min_tokens", self.min_tokens, 0 <= self.min_tokens <= most, "between 0 and max_tokens")
        _require("bad_words", self.bad_words, all(self.bad_words), "non-empty")
        _at_most("bad_words", sum(map(len, self.bad_words)), MAX_BAD_WORD_TOKENS, "tokens in all")
        if self.allowed_token_ids is not None:
            _require("allowed_token_ids", "empty", bool(self.allowed_token_ids), "one token id at least, or left out")
            _at_most("allowed_token_ids", len(self.allowed_token_ids), MAX_ALLOWED_TOKENS, "entries")
            least = min(self.allowed_token_ids)
            _require("allowed_token_ids", f"{least} among others", least >= 0, "token ids")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(name, value, value is None or 0 <= value <= MAX_LOGPROBS, f"between 0 and {MAX_LOGPROBS}")
        _at_most("logprob_token_ids", len(self.logprob_token_ids), MAX_LOGPROBS, "entries")
        scored = self.logprobs is not None or not self.logprob_token_ids
        _require("logprob_token_ids", "given", scored, "left out, or logprobs given")
        if self.pooling is not None:
            _require("pooling", self.pooling, self.pooling in POOLINGS, f"one of {', '.join(POOLINGS)}")
            _require("max_tokens", self.max_tokens, self.max_tokens == 1, "1 for a pooling request")
        _require("classify", self.classify, self.pooling is not None or not self.classify, "false without pooling")


class Seeds:
    """Draws the seeds of requests that bring none, where they enter: an engine that takes a request over draws nothing.

    May be used by any thread.
    """

    def __init__(self, seed: int | None) -> None:
        """seed: makes all that are drawn reproducible; None: none are."""
        self._random = random.Random(seed)

    def fill(self, params: RequestParams) -> RequestParams:
        """Return the parameters with a seed."""
        return params if params.seed is not None else replace(params, seed=self._random.getrandbits(63))


def _at_most(name: str, count: int, most: int, noun: str) -> None:
    if count > most:
        raise InvalidRequest(name, f"{name} has {count} {noun}; at most {most} are taken")


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise InvalidRequest(name, f"{name} is {value}; it must be {wanted}")
