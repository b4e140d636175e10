"""Numbers that are added to scores by distance: transformers' own, in chunks and rows of one token, within windows."""

from __future__ import annotations

import pytest
import torch

from chorus.ops.attention import attention
from chorus.ops.attention.attention import HeadShape, PagedAttention, Scores
from chorus.ops.attention.attention_backend import flashinfer_obstacle, triton_obstacle
from chorus.ops.attention.relative import Relative

HEADS = HeadShape(4, 2, 8, 4)
EXTENT = 9
"""Fewer distances than a row has keys."""


@pytest.fixture
def drawn():
    generator = torch.Generator().manual_seed(4)
    return lambda *shape: torch.randn(*shape, generator=generator)


def wanted(q, k, v, relative: Relative, scores: Scores):
    """transformers' module, of one whole row: `[tokens, heads, dim]`."""
    from transformers.models.inkling.modeling_inkling import InklingRelativeLogits

    module = InklingRelativeLogits(*relative.profiles.shape)
    module.proj.data = relative.profiles
    places = torch.arange(len(q))
    with torch.no_grad():
        bias = module(relative.states[None], places, places)[0]
    k, v = (each.repeat_interleave(2, 1) for each in (k, v))
    assert scores.scale is not None
    found = torch.einsum("qhd,khd->hqk", q, k) * scores.scale + bias
    ages = places[:, None] - places
    seen = (ages >= 0) & (ages < (scores.window or len(q)))
    return torch.einsum("hqk,khd->qhd", found.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("lengths", [[23], [1, 22], [10, 12, 1], [17, 1, 1, 1, 1, 1, 1]], ids=str)
def test_a_row_is_transformers_own_however_it_is_cut(drawn, monkeypatch, window, lengths):
    monkeypatch.setattr(attention, "MOST_SCORES", 100)  # so that a chunk's scores are made in parts
    q, k, v, relative = drawn(23, 4, 8), drawn(23, 2, 8), drawn(23, 2, 8), Relative(drawn(23, 4, 3), drawn(3, EXTENT))
    scores, table = Scores(0.3, window, has_relative=True), torch.tensor([[7, 1, 3, 0, 6, 2]])
    caches = [torch.full((8, 4, 2, 8), torch.nan) for _ in "kv"]
    paged, done, found = PagedAttention(HEADS), 0, []
    for length in lengths:
        for token in range(done, done + length):
            for cache, rows in zip(caches, (k, v), strict=True):
                cache[table[0, token // 4], token % 4] = rows[token]
        own, done = slice(done, done + length), done + length
        paged.plan([0, length], table[:, : -(-done // 4)], [done])
        found.append(paged.run(q[own], *caches, scores=scores, relative=relative._replace(states=relative.states[own])))
    torch.testing.assert_close(torch.cat(found).view(23, 4, 8), wanted(q, k, v, relative, scores))


def test_rows_of_one_token_have_their_own_distances(drawn):
    lens, table = [3, 14, 8], torch.tensor([[0, 8, 8, 8], [1, 2, 3, 4], [5, 6, 8, 8]])
    caches, paged = [drawn(9, 4, 2, 8) for _ in "kv"], PagedAttention(HEADS)
    q, relative, scores = drawn(3, 4, 8), Relative(drawn(3, 4, 3), drawn(3, EXTENT)), Scores(0.3, has_relative=True)
    paged.plan([0, 1, 2, 3], table, lens)
    found = paged.run(q, *caches, scores=scores, relative=relative).view(3, 4, 8)
    for row, length in enumerate(lens):
        k, v = (cache[table[row]].flatten(0, 1)[:length] for cache in caches)
        every = q[row].expand(length, -1, -1), relative._replace(states=relative.states[row].expand(length, -1, -1))
        torch.testing.assert_close(found[row], wanted(every[0], k, v, every[1], scores)[-1])


def test_what_is_added_does_not_reach_farther_than_the_vectors(drawn):
    relative = Relative(drawn(1, 2, 5, 3), drawn(3, 2))
    found = relative.biases(torch.arange(5)[None], 5)
    assert found.dtype == torch.float32
    ages = torch.arange(5)[:, None] - torch.arange(5)
    assert torch.equal(found != 0, ((ages == 0) | (ages == 1)).expand(1, 2, -1, -1))


def test_other_attention_refuses_it(drawn):
    pytest.importorskip("triton")
    from chorus.ops.attention.attention_triton import TritonDecodeAttention, TritonRaggedAttention

    assert not TritonDecodeAttention.supports_relative
    assert not TritonRaggedAttention.supports_relative
    scores, device = (Scores(has_relative=True),), torch.device("cuda")
    assert "no relative attention" in str(triton_obstacle(2, 64, torch.bfloat16, device, scores))
    assert "relative attention" in str(flashinfer_obstacle(2, 64, torch.bfloat16, device, scores))
