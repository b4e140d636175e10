"""A made-up model, whose tokens and KV tell their inputs."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Sequence
from functools import lru_cache

from chorus.core.requests.grammar import Grammar
from chorus.core.requests.types import FinishReason, StepPlan, TokenLogprobs
from chorus.memory.adapters.adapter import Adapter
from chorus.memory.files.manifest import AdapterManifest

from .asked import Asked, Told
from .made_up_grammar import allowed

VOCAB = 48
EOS = (0, 1)
MAX_MODEL_LEN = 40
Memory = list[list[object]]
"""The content of each position of each page of an arena; an adapter's part, or a shadow's, is at a page's first one."""
BASE_CONTENT = 0
"""Content of the base model; adapters' contents count from 1."""
FIRST_COMPOSED = 1 << 20
"""Contents of composed adapters are these and larger ones."""


def empty_memory(num_pages: int, block_tokens: int) -> Memory:
    return [[None] * block_tokens for _ in range(num_pages)]


def content_of(adapter: Adapter | None) -> int:
    return BASE_CONTENT if adapter is None else content_in(adapter.manifest)


def content_in(manifest: AdapterManifest) -> int:
    """The content of an adapter's files; of a composed one a number that its sources' contents and scales make."""
    if not manifest.sources:
        return manifest.mtime_ns
    parts = [(content_in(source), scale) for source, scale in manifest.sources]
    return FIRST_COMPOSED + zlib.crc32(repr(parts).encode())


def next_token(
    content: int,
    tokens: Sequence[int],
    seed: int | None,
    changed_from: int = 0,
    grammar: Grammar | None = None,
    prompt: int = 0,
) -> int:
    """Return the token that follows `tokens` with the adapter content, among those that a grammar allows.

    seed: only where the token is sampled. prompt: number of tokens before the answer.
    """
    kv = (content, changed_from) if changed_from else content
    drawn = zlib.crc32(repr((kv, list(tokens), seed)).encode())
    may = range(VOCAB) if grammar is None else allowed(grammar, tokens[prompt:])
    return may[drawn % len(may)]


def kv_of(content: int, tokens: Sequence[int], changed_from: int = 0, dtype: str = "auto") -> list[int]:
    """The KV of `tokens`, position by position: it depends on the adapter's content, on the dtype and on every token so
    far.

    changed_from: the first token that the adapter changes.
    """
    if not changed_from:
        return kv_behind(kv_before(content, dtype), tuple(tokens))
    base = kv_behind(kv_before(BASE_CONTENT, dtype), tuple(tokens[:changed_from]))
    return base + kv_behind(branched(base[-1], content), tuple(tokens[changed_from:]))


def branched(last: int, content: int) -> int:
    """The value from which an adapter's KV follows, if it begins after the base model's KV `last`."""
    return hash((last, -1, content)) if content else last


def kv_before(content: int, dtype: str = "auto") -> int:
    """The value before the first token, from which its KV follows."""
    return hash(content) if dtype == "auto" else hash((content, zlib.crc32(dtype.encode())))


@lru_cache(1 << 14)
def kv_behind(last: int, tokens: tuple[int, ...]) -> list[int]:
    """The KV of `tokens` that follow a position with the KV `last`; not to be changed."""
    return list(itertools.accumulate(tokens, lambda before, token: hash((before, token)), initial=last))[1:]


def seconds_of(plan: StepPlan) -> float:
    """Virtual seconds that a step takes."""
    return 0.0005 + 0.0005 * plan.num_tokens


def answer_alone(asked: Asked) -> Told:
    """The outputs that a request gets when nothing disturbs it."""
    params, prompt, told, content = asked.request.params, asked.prompt, Told(), content_of(asked.adapter)
    seed = asked.request.seed if params.temperature else None
    while told.reason is None:
        inputs = asked.inputs(prompt + told.tokens)
        token = next_token(content, inputs, seed, asked.changed_from, params.grammar, len(prompt))
        told.tokens.append(token)
        ends = token in EOS and (not params.ignore_eos or params.grammar is not None)  # nothing goes on after a grammar
        if token in params.stop_token_ids or ends:
            told.reason = FinishReason.STOP
        elif len(told.tokens) == params.max_tokens or len(prompt) + len(told.tokens) == MAX_MODEL_LEN:
            told.reason = FinishReason.LENGTH
    if params.logprobs is not None:
        told.logprobs = [TokenLogprobs(token, -1.0) for token in told.tokens]
    if params.prompt_logprobs is not None:
        told.scores = [TokenLogprobs(token, -float(at)) for at, token in enumerate(prompt) if at]
    return told
