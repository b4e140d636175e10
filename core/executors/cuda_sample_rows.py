"""Sequences of no request, with which steps are timed and their memory is measured.

Tests: tests/core/executors/test_cuda_interpreted.py.
"""

from __future__ import annotations

from ...memory.pages.arena import Arena
from ...memory.pages.layout import PageLayout
from ...memory.pages.pool import PagePool
from ...memory.pages.states import StateSlots
from ..requests.request_params import MAX_ALLOWED_TOKENS, RequestParams
from ..requests.types import BASE_LORA_INDEX, ScheduledSequence

#: Tokens of each sequence in a step that attention is timed with.
_SAMPLE_TOKENS = 1024


def scattered_rows(count: int, arena: Arena, max_model_len: int) -> list[ScheduledSequence]:
    """Decoding sequences whose pages lie all over the arena."""
    length, layout = min(_SAMPLE_TOKENS, max_model_len), arena.layout
    width, num_pages = layout.table_width(length), len(arena.pages)
    return [
        _row(layout, index, [0], start=length - 1, pages=[(index * width + at) % num_pages for at in range(width)])
        for index in range(count)
    ]


def largest_rows(
    layout: PageLayout, *, most_rows: int, most_tokens: int, max_model_len: int, vocab: int
) -> list[ScheduledSequence]:
    """Sequences of the largest possible step, with KV in the dummy page: a prefill of the most tokens, sampling, prompt
    logprobs.

    It samples for as many sequences as a step may have, and computes log-probabilities of as many prompt tokens.
    The last sequence has one token, so kernels for decoding sequences among prompts are loaded, too.
    """
    allowed = tuple(range(min(vocab, MAX_ALLOWED_TOKENS)))
    params = RequestParams(top_k=max(1, vocab // 2), top_p=0.9, min_p=0.1, prompt_logprobs=1, allowed_token_ids=allowed)
    decoding = [1] * (most_rows > 1)
    lengths, left = [], most_tokens - len(decoding)
    while left and len(lengths) < most_rows - len(decoding):
        lengths.append(min(left, max_model_len))
        left -= lengths[-1]
    pages = [[PagePool.DUMMY] * layout.table_width(length) for length in lengths + decoding]
    return [
        _row(layout, index, [0] * length, pages=pages[index], params=params)
        for index, length in enumerate(lengths + decoding)
    ]


def _row(
    layout: PageLayout,
    index: int,
    tokens: list[int],
    *,
    pages: list[int],
    start: int = 0,
    params: RequestParams | None = None,
) -> ScheduledSequence:
    """A sequence of no request, of the base model."""
    return ScheduledSequence(
        request_id=str(index),
        lora_index=BASE_LORA_INDEX,
        tokens=tokens,
        start=start,
        pages=pages,
        params=params or RequestParams(),
        seed=0,
        samples=True,
        token_ids=tokens,
        num_prompt_tokens=start + len(tokens),
        states=StateSlots([[PagePool.DUMMY] * layout.state_pages]) if layout.states else None,
    )
