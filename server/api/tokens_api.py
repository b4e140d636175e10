"""POST /inference/v1/generate, vLLM's route from tokens to tokens: its body as a completion request, and its response.

Tests: tests/server/api/test_tokens_api.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pydantic import Field, StrictInt

from ..access.limits import RequestLimits
from ..engine.generation import Choice, Delta
from .completion_request import CompletionRequest
from .generate_request import NEUTRAL
from .openai import Name
from .responses import Body, BodyFormat
from .translation import OtherBody, renaming

NAMES = {"prompt": "token_ids"}

HARMLESS = frozenset(("detokenize", "output_kind", "skip_reading_prefix_cache"))
"""Sampling parameters on which no token depends."""

_COMPLETIONS = "send the tokens as prompt to POST /v1/completions"


class TokensBody(OtherBody):
    """A request as the client sends it."""

    refused = {
        "features": ((), "images come with chats; send them to POST /v1/chat/completions"),
        "kv_transfer_params": ((), "KV is not sent between servers; leave it out"),
        "stream": ((False,), f"the response comes whole; {_COMPLETIONS}, with return_token_ids"),
        "stream_options": ((), f"the response comes whole; {_COMPLETIONS}"),
    }
    harmless = frozenset(("priority", "request_id"))

    model: Name | None = None
    token_ids: list[StrictInt] = Field(min_length=1)
    sampling_params: dict[str, Any] = {}
    cache_salt: Any = None

    def completion(self, limits: RequestLimits) -> CompletionRequest:
        """The equivalent completion request: vLLM's defaults, whatever the model's generation_config.json says."""
        given = {name: value for name, value in self.sampling_params.items() if name not in HARMLESS}
        same = self.model_dump(include={"model", "cache_salt"}, exclude_none=True)
        with renaming(NAMES):
            return CompletionRequest.of({**NEUTRAL, **given, **same, "prompt": self.token_ids}, limits)


class TokensFormat(BodyFormat):
    """Tokens, and their log-probabilities as a chat completion has them."""

    def answer(self) -> Body:
        asked, (first, *_) = self._asked, self._generation.choices
        scores = None
        if asked.prompt_logprobs is not None:
            scores = self._scores.prompt(first.prompt_logprobs or (), asked.prompt_logprobs)
        return {
            "request_id": self._generation.id,
            "choices": [self._choice(choice) for choice in self._generation.choices],
            "prompt_logprobs": scores,
            "kv_transfer_params": None,
            "usage": self.usage(),
        }

    def _choice(self, choice: Choice) -> Body:
        count = self._logprobs
        return {
            "index": choice.index,
            "token_ids": choice.token_ids,
            "logprobs": None if count is None else self._scores.chat(choice.logprobs, count),
            "finish_reason": choice.finish_reason,
        }

    def chunks(self, delta: Delta) -> Iterator[Body]:
        """Nothing: the request can't be streamed."""
        return iter(())
