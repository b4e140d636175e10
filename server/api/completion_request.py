"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Any

from pydantic import field_validator

from ...core.requests.request_params import InvalidRequest
from ..access.limits import RequestLimits
from ..errors import ApiError
from .fields import unsupported
from .openai import GenerationRequest, LogprobCount

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default of max_tokens for completions."""


class CompletionRequest(GenerationRequest):
    """One or more prompts to continue."""

    prompt: Any = None
    max_completion_tokens: int | None = None
    best_of: int | None = None
    echo: bool = False
    logprobs: LogprobCount | None = None
    add_special_tokens: bool = True

    @field_validator("logprobs", mode="before")
    @classmethod
    def _false_is_none(cls, logprobs: Any) -> Any:
        return None if logprobs is False else logprobs

    def check(self, limits: RequestLimits) -> None:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
        if self.best_of is not None and self.best_of != self.n:
            raise unsupported(
                "best_of",
                f"best_of is {self.best_of} and n is {self.n}; generating more choices than are returned is "
                "not supported: leave best_of out, or set it to n",
            )

    @property
    def asked_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        asked = [self.prompt_logprobs, self.logprobs if self.echo else None]
        return max((count for count in asked if count is not None), default=None)

    @property
    def prompt_only(self) -> bool:
        return self.echo and self.asked_tokens == 0

    @property
    def asked_tokens(self) -> int:
        asked = self.max_tokens if self.max_tokens is not None else self.max_completion_tokens
        return DEFAULT_MAX_TOKENS if asked is None else asked

    @property
    def limit_field(self) -> str | None:
        return super().limit_field or (None if self.max_completion_tokens is None else "max_completion_tokens")

    def prompts(self, limit: int) -> list[str | list[int]]:
        """One entry per choice: a text or token ids."""
        prompt = self.prompt
        if isinstance(prompt, str) or is_token_list(prompt):
            return [prompt]
        if not isinstance(prompt, list) or not prompt:
            raise InvalidRequest(
                "prompt", "prompt must be a string, a list of token ids, or a non-empty list of either"
            )
        if len(prompt) > limit:
            raise InvalidRequest("prompt", f"at most {limit} prompts are allowed in one request, got {len(prompt)}")
        for index, entry in enumerate(prompt):
            if not (isinstance(entry, str) or is_token_list(entry)):
                raise InvalidRequest(f"prompt[{index}]", f"prompt[{index}] must be a string or a list of token ids")
        return prompt


def is_token_list(prompt: Any) -> bool:
    """True for a prompt that is given as token ids."""
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)
