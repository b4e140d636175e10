"""Limits of one request, and checks of its JSON before the JSON is parsed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from ...core.requests.request_params import MAX_LOGPROBS
from ..errors import ApiError

MAX_DEPTH = 64
LARGE = 1 << 20
"""Bytes of a body from which on its values are counted in memory, too."""

MOST_TIMES = 8
NOT_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")

COUNTED = {
    "messages": "max_messages",
    "stop": "max_stop_strings",
    "bad_words": "max_bad_words",
    "logit_bias": "max_logit_bias",
    "allowed_token_ids": "max_allowed_tokens",
    "stop_token_ids": "max_logit_bias",
    "logprob_token_ids": "max_logprobs",
    "tools": "max_tools",
}
"""Fields with several entries, and the limit on their number."""


class RequestLimits(BaseModel):
    """Limits of requests; a request beyond one is refused with a 400. The server's settings inherit them."""

    max_logprobs: int = Field(
        default=20, ge=0, le=MAX_LOGPROBS, description="maximum log-probabilities per token in a request"
    )
    max_scores: int = Field(
        default=100_000,
        ge=1,
        description="maximum log-probabilities in one response: tokens times one more than their alternatives",
    )
    max_prompts: int = Field(default=128, ge=1, description="maximum choices in one request: prompts times n")
    max_inputs: int = Field(
        default=2048, ge=1, description="maximum texts in one request for embeddings, classes, scores or a ranking"
    )
    max_call_tokens: int = Field(
        default=1 << 18, ge=1, description="maximum prompt tokens in one request, each prompt counted n times"
    )
    max_messages: int = Field(default=1024, ge=1, description="maximum messages in a conversation")
    max_tools: int = Field(default=128, ge=0, description="maximum tools in a request")
    max_tool_bytes: int = Field(default=256 << 10, ge=0, description="maximum bytes of a request's tools")
    max_stop_strings: int = Field(default=16, ge=0, description="maximum stop strings")
    max_bad_words: int = Field(default=256, ge=0, description="maximum bad words")
    max_logit_bias: int = Field(default=1024, ge=0, description="maximum entries of logit_bias, or of stop_token_ids")
    max_allowed_tokens: int = Field(default=16384, ge=1, description="maximum entries of allowed_token_ids")
    max_grammar_bytes: int = Field(
        default=32 << 10, ge=1, description="maximum bytes of a JSON schema, of choices or of another grammar"
    )
    max_pattern_bytes: int = Field(
        default=8 << 10,
        ge=1,
        description="maximum bytes of regular expressions, or of rules, in a grammar; compile time grows with "
        "their square, to half a second",
    )
    max_steering: int = Field(
        default=8192,
        ge=1,
        description="maximum bad words, logit_bias entries, allowed token ids and stop string characters "
        "together, each times the choices of the request",
    )
    max_json_values: int = Field(default=1 << 17, ge=16, description="maximum values in a request's JSON")


def check_json(body: bytes, max_values: int) -> None:
    """Raises an ApiError for JSON with too many values or too deep nesting, and for a large one that would take many
    times its bytes. Takes a few passes over the text.
    """
    size = len(body)
    at_most = body.count(b",") + body.count(b"[") + body.count(b"{") + 1
    if at_most <= MAX_DEPTH:
        return
    if b"\\" in body:
        body = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if body.count(b'"') > 4 * max_values:  # each string has two quotes and is a value or the name of one
        raise too_many(max_values)
    outside = b"".join(body.split(b'"')[::2])
    commas, lists, objects = (outside.count(mark) for mark in (b",", b"[", b"{"))
    if commas + lists + objects + 1 > max_values:
        raise too_many(max_values)
    num_bytes = 64 * commas + 80 * (body.count(b'"') // 2) + 32 * lists + 128 * objects
    if size > LARGE and num_bytes > MOST_TIMES * size:
        raise ApiError(
            400,
            f"the body's JSON of {size} bytes would take {num_bytes} bytes of memory; one of more than {LARGE} "
            f"bytes may take {MOST_TIMES} times its own: send less in one request",
            code="too_many_values",
        )
    depth = 0
    for bracket in outside.translate(None, NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise ApiError(400, f"the body's JSON is nested more than {MAX_DEPTH} levels deep")


def too_many(limit: int) -> ApiError:
    """The error for a body with more values."""
    return ApiError(
        400, f"the body's JSON has more than the {limit} values that this server accepts", code="too_many_values"
    )


def check_counts(body: dict[str, Any], limits: RequestLimits) -> None:
    """Raises an ApiError for a field with too many entries, before the entries are processed."""
    for name, limit in COUNTED.items():
        entries = body.get(name)
        most = getattr(limits, limit)
        if isinstance(entries, list | dict) and len(entries) > most:
            raise ApiError(400, f"{name} has {len(entries)} entries, this server accepts {most}", param=name)
