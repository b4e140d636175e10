"""Limits of one request."""

from __future__ import annotations

from pydantic import BaseModel, Field

from ..core.requests.sampling_params import MAX_LOGPROBS


class RequestLimits(BaseModel):
    """Limits beyond which a request is refused with a 400. The server's settings extend it."""

    max_logprobs: int = Field(
        default=20, ge=0, le=MAX_LOGPROBS, description="most log-probabilities that can be asked for with a token"
    )
    max_scores: int = Field(
        default=100_000,
        ge=1,
        description="most log-probabilities in one answer: tokens with theirs, times one more than their alternatives",
    )
    max_call_tokens: int = Field(
        default=1 << 18, ge=1, description="most prompt tokens in one call, each prompt times the answers to it"
    )
    max_messages: int = Field(default=1024, ge=1, description="most messages in one conversation")
    max_stop_strings: int = Field(default=16, ge=0, description="most stop strings")
    max_bad_words: int = Field(default=256, ge=0, description="most bad words")
    max_logit_bias: int = Field(default=1024, ge=0, description="most entries of logit_bias, or of stop_token_ids")
    max_allowed_tokens: int = Field(default=16384, ge=1, description="most entries of allowed_token_ids")
    max_steering: int = Field(
        default=8192,
        ge=1,
        description="most bad words, logit_bias entries, allowed token ids and characters of stop strings, each times "
        "the answers in the call",
    )
    max_json_values: int = Field(default=1 << 17, ge=16, description="most values in a request's JSON")
