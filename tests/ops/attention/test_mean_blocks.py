"""The choice of blocks by the mean of their keys, and attention to them, against formulas of one query at a time."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import strategies as st

from chorus.ops.attention import attention
from chorus.ops.attention.attention import HeadShape, KeyBlocks, KvCache, PagedAttention, Scores
from chorus.ops.attention.block_attention import BlockAttention

from .test_key_blocks import BLOCK, DIM, GROUPS, HEADS, KEY, index_keys, step
from .test_latent_attention import given_steps

pytestmark = pytest.mark.wide

BLOCKS = KeyBlocks(3, 3, 0)
SCORES = Scores(0.3, top_k=11, key_block=3)


def keys_of(means: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
    """Keys depend on where blocks begin."""
    return means * (1 + firsts[:, None] % 5)


def chosen_by(q: torch.Tensor, kept: torch.Tensor) -> list[int]:
    """The places that one query attends to, which sees all these keys. q: `[heads, key]`."""
    size = BLOCKS.size
    whole = len(kept) // size
    scores = []
    for block in range(whole):
        key = kept[block * size : (block + 1) * size].mean(0) * (1 + block * size % 5)
        scores.append(float(torch.relu(q @ key).sum()))
    best = sorted(range(whole), key=lambda block: -scores[block])[: BLOCKS.top]
    return [place for block in sorted(best) for place in range(block * size, (block + 1) * size)] + [
        *range(whole * size, len(kept))
    ]


@given_steps(heads=st.integers(1, 3))
def test_queries_attend_to_the_blocks_with_the_highest_scores(seed, rows, most, heads):
    """most: scores that are made at once. heads: of the indexer."""
    caches, q, _, starts, page_table, tables, lens = step(seed, rows)
    index = torch.randn(len(q), heads, KEY, generator=torch.Generator().manual_seed(seed))
    found = BlockAttention(HeadShape(HEADS, GROUPS, DIM, BLOCK))
    found.plan(starts, page_table, lens)
    with patch.object(attention, "MOST_SCORES", most):
        chosen = found.choose_means(index, KvCache(*(each[..., DIM:] for each in caches)), BLOCKS, keys_of)
        k, v = (each[..., :DIM] for each in caches)
        got = found.run(q, k, v, None, SCORES, chosen=chosen)
    for row, (table, length) in enumerate(zip(tables, lens, strict=True)):
        kept = index_keys(caches, table, length)
        keys, values = (each[table].flatten(0, 1)[:length] for each in (k, v))
        for token in range(starts[row], starts[row + 1]):
            seen = length - (starts[row + 1] - token) + 1
            places = chosen_by(index[token], kept[:seen])
            for head in range(HEADS):
                group = head // (HEADS // GROUPS)
                weights = (keys[places, group] @ q[token, head] * 0.3).softmax(0)
                want = weights @ values[places, group]
                torch.testing.assert_close(got[token].view(HEADS, DIM)[head], want, rtol=1e-4, atol=1e-5)


def test_attention_without_blocks_chooses_none():
    with pytest.raises(NotImplementedError, match="no indexer of blocks"):
        PagedAttention(HeadShape(HEADS, GROUPS, DIM, BLOCK)).choose_means(
            torch.empty(0), KvCache(torch.empty(0), torch.empty(0)), BLOCKS, keys_of
        )
