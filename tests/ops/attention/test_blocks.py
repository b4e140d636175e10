"""Attention with blocks: masks against their definition, and that other rows are as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from chorus.ops.attention.attention import GroupedAttention, HeadShape, PagedAttention, Scores
from chorus.ops.attention.blocks import BlockMask, BlockSpans

BLOCK, HEADS = 4, HeadShape(4, 2, 16, 4)


def spans(length: int, start: int, *blocks: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    before, behind = np.zeros(length, np.int32), np.zeros(length, np.int32)
    for first, end in blocks:
        for place in range(first, end):
            before[place - start], behind[place - start] = place - first, end - 1 - place
    return before, behind


def wanted(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, start: int, blocks: tuple[tuple[int, int], ...], scores: Scores
) -> torch.Tensor:
    """One row by the definition: token by token."""
    found = []
    for at, query in enumerate(q):
        own = start + at
        block = next(((first, end) for first, end in blocks if first <= own < end), (own, own + 1))
        seen = []
        for place in range(len(k)):
            in_block = block[0] <= place < block[1] and scores.blocks is not BlockMask.NONE
            in_window = scores.window is None or place > own - scores.window
            causal = place <= own and in_window
            seen.append(causal or (in_block and (in_window or scores.blocks is BlockMask.WHOLE)))
        heads = [
            torch.softmax(query[head] @ k[seen][:, head // 2].T * 16**-0.5, -1) @ v[seen][:, head // 2]
            for head in range(4)
        ]
        found.append(torch.cat(heads))
    return torch.stack(found)


@pytest.mark.parametrize("mask", [*BlockMask])
@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("start", [0, 6])
def test_tokens_of_a_block_see_each_other(mask: BlockMask, window: int | None, start: int) -> None:
    generator = torch.Generator().manual_seed(1)
    blocks, length = ((7, 13), (14, 19)), 24 - start
    k_cache, v_cache = (torch.randn(32, BLOCK, 2, 16, generator=generator, dtype=torch.float64) for _ in range(2))
    table = torch.randperm(32, generator=generator)[:14].view(2, 7)
    q = torch.randn(length + 5, 4, 16, generator=generator, dtype=torch.float64)
    own, none = spans(length, start, *blocks), np.zeros(5, np.int32)
    step = BlockSpans(np.concatenate([own[0], none]), np.concatenate([own[1], none]))
    attention = GroupedAttention([(PagedAttention(HEADS), window)], BLOCK)
    attention.plan([0, length, length + 5], table, [24, 11], blocks=step)
    scores = Scores(window=window, blocks=mask)
    found = attention.of(0).run(q, k_cache, v_cache, scores=scores)
    k, v = (cache[table[0]].flatten(0, 1)[:24] for cache in (k_cache, v_cache))
    assert torch.allclose(found[:length], wanted(q[:length], k, v, start, blocks, scores))
    k, v = (cache[table[1]].flatten(0, 1)[:11] for cache in (k_cache, v_cache))
    assert torch.allclose(found[length:], wanted(q[length:], k, v, 6, (), scores))


def test_a_key_that_is_not_finite_reaches_those_that_see_it() -> None:
    k_cache, v_cache = torch.randn(2, 3, BLOCK, 2, 16)
    k_cache[1, 2] = torch.nan  # position 6
    attention = PagedAttention(HEADS)
    attention.plan([0, 10], torch.arange(3)[None], [10], blocks=BlockSpans(*spans(10, 0, (2, 8))))
    scores = Scores(blocks=BlockMask.IN_WINDOW)
    found = attention.run(torch.randn(10, 4, 16), k_cache, v_cache, scores=scores)
    assert found.isnan().any(1).tolist() == [False, False, *[True] * 8]


def test_attention_without_blocks_says_so() -> None:
    pytest.importorskip("triton")
    from chorus.ops.attention.attention_triton import TritonDecodeAttention

    attention = TritonDecodeAttention.__new__(TritonDecodeAttention)
    with pytest.raises(NotImplementedError, match="TritonDecodeAttention has no blocks"):
        attention.plan([0, 2], torch.zeros(1, 1).long(), [2], blocks=BlockSpans(*spans(2, 0, (0, 2))))
