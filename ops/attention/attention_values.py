"""Compares an attention backend with PyTorch's operators, on a few sequences.

Tests: tests/ops/attention/test_attention_values.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from .attention import Attention, AttentionSetup, PagedAttention, Scores

#: The largest difference, relative to the largest value: two units in the last place of that.
TOLERANCE = {torch.bfloat16: 2.0**-6, torch.float16: 2.0**-9, torch.float32: 2.0**-20}

#: Pages of the longest sequence, as far as there may be so many.
_PAGES = 3


class Compared(Protocol):
    """What is compared of an `AttentionBackend`."""

    def ragged(self) -> Attention: ...
    def decode(self, bucket: int, /) -> Attention: ...


def values_problem(setup: AttentionSetup, backend: Compared) -> str | None:
    """Why a backend can't be used: it fails, or its values differ from `PagedAttention`'s; None if it can.

    A chunk of a prompt beside a decoding sequence, and decode steps after one another, with random keys, values and
    queries, in pages that are not in order, for all scores of the setup.
    """
    heads, tokens = setup.heads, setup.heads.block_tokens
    width = min(_PAGES, setup.max_pages_per_row)
    longest = width * tokens - tokens // 2
    generator = torch.Generator(setup.device).manual_seed(heads.head_dim)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=setup.device).to(setup.dtype)

    pages = numbers(1 + 2 * width, 2, tokens, heads.kv_heads, heads.head_dim).to(setup.kv_dtype)
    reference = PagedAttention(heads, setup.device)
    chunk = max(1, longest // 2)
    mixed, single = ([chunk, 1], [longest, tokens + 1]), ([1, 1], [longest - 1, tokens])
    following = [1, 1], [longest, tokens + 1]
    most = min(2, setup.max_rows)
    try:
        ragged, bucket = backend.ragged(), backend.decode(most)
        for attention, (counts, lens) in ((ragged, mixed), (bucket, single), (bucket, following)):
            lens = [min(each, longest) for each in lens[:most]]
            indptr = [0, *torch.tensor(counts[:most]).cumsum(0).tolist()]
            q = numbers(indptr[-1], heads.num_heads, heads.head_dim)
            for scores in setup.scores:
                want = _attend(reference, q, pages, (indptr, lens), scores)
                error = _difference(_attend(attention, q, pages, (indptr, lens), scores), want)
                if not error <= (limit := TOLERANCE[setup.dtype]):
                    return f"it differs by {error:.1e} of the largest value, more than {limit:.1e}"
    except Exception as error:  # of any part of a library
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _attend(
    attention: Attention,
    q: torch.Tensor,
    pages: torch.Tensor,
    rows: tuple[Sequence[int], Sequence[int]],
    scores: Scores,
) -> torch.Tensor:
    """Rows of every other page each, the last first."""
    indptr, lens = rows
    last, width = len(pages) - 1, len(pages) // 2
    table = torch.tensor([[last - 2 * page - row for page in range(width)] for row in range(len(lens))])
    attention.plan(indptr, table, lens)
    return attention.run(q, pages[:, 0], pages[:, 1], scores=scores).float()


def _difference(found: torch.Tensor, want: torch.Tensor) -> float:
    return float((found - want).abs().max() / want.abs().max())
