"""Attention over latents against keys and values that are made of them, in steps of every kind of rows."""

from __future__ import annotations

import itertools
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from chorus.ops.attention import attention, attention_backend
from chorus.ops.attention.attention import HeadShape
from chorus.ops.attention.latent_attention import LatentAttention
from chorus.ops.attention.latents import LatentHeads

from .attention_ref import paged_attention_ref

HEADS, KEY, ROTATED, VALUE, RANK, BLOCK = 3, 6, 4, 5, 12, 4
WIDTH = HEADS * (KEY + VALUE)
SCALE = 0.3


def given_steps(**more):
    """Draws seeds, rows of (tokens now, tokens before), and the most scores that are made at once."""
    chunks = st.lists(st.tuples(st.integers(2, 30), st.integers(0, 9)), max_size=3)
    decodes = st.lists(st.tuples(st.just(1), st.integers(0, 20)), max_size=4)
    rows = st.tuples(chunks, decodes).map(lambda both: both[0] + both[1]).filter(bool)
    most = st.sampled_from([1, 40, 1 << 20])
    drawn = given(seed=st.integers(0, 2**32 - 1), rows=rows, most=most, **more)
    return lambda test: settings(max_examples=60)(drawn(test))


def step(seed, rows):
    """Latents in pages, block tables, queries and weights for rows of (tokens now, tokens before)."""
    generator = torch.Generator().manual_seed(seed)
    lens = [now + before for now, before in rows]
    starts = [0, *itertools.accumulate(now for now, _ in rows)]
    counts = [-(-length // BLOCK) for length in lens]
    order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()
    tables = [[order.pop() for _ in range(count)] for count in counts]
    page_table = torch.tensor([table + [0] * (max(counts) - len(table)) for table in tables])
    cache = torch.randn(sum(counts) + 1, 2, BLOCK, 1, RANK + ROTATED, generator=generator)[:, 1]
    q = torch.randn(starts[-1], HEADS, KEY + ROTATED, generator=generator)
    kv_up = torch.randn(WIDTH, RANK, generator=generator)
    return cache, q, kv_up, starts, page_table, tables, lens


def made(cache, kv_up):
    """Keys and values of all heads, in pages of the same numbers."""
    both = (cache[..., 0, :RANK] @ kv_up.T).unflatten(-1, (HEADS, KEY + VALUE))
    key = cache[..., RANK:].expand(-1, -1, HEADS, -1)
    return torch.cat((both[..., :KEY], key), -1), both[..., KEY:]


def run(cache, q, kv_up, starts, page_table, lens):
    latents = LatentAttention(HeadShape(HEADS, 1, RANK + ROTATED, BLOCK))
    latents.plan(starts, page_table, lens)
    return latents.run_latents(q, cache, LatentHeads(kv_up, HEADS, KEY, ROTATED), scores=attention.Scores(SCALE))


@pytest.mark.wide
@given_steps()
def test_both_ways_are_attention_over_keys_and_values(seed, rows, most):
    """Chunks of 17 tokens and more have keys and values made. most: scores that are made at once."""
    cache, q, kv_up, starts, page_table, tables, lens = step(seed, rows)
    assert LatentHeads(kv_up, HEADS, KEY, ROTATED).break_even == 17
    with patch.object(attention, "MOST_SCORES", most):
        found = run(cache, q, kv_up, starts, page_table, lens)
    want = paged_attention_ref(q, *made(cache, kv_up), starts, tables, lens, attention.Scores(scale=SCALE))
    torch.testing.assert_close(found, want.flatten(1), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("width", "scores", "why"),
    [
        (RANK + ROTATED, attention.Scores(window=5), "the decode kernel has no windows over latents"),
        (RANK, attention.PLAIN, "the decode kernel reads a rotated key behind each latent, and the model's have none"),
    ],
)
def test_on_a_gpu_pytorchs_operators_attend_where_the_kernel_cant(monkeypatch, width, scores, why):
    """Of GLM-5.3-Flash and of some layers of Mistral Large 4 no key is rotated."""
    monkeypatch.setattr(attention_backend, "triton_obstacle", lambda *_, **how: None)
    shape, device = HeadShape(HEADS, 1, width, BLOCK), torch.device("cuda")
    setup = attention.AttentionSetup(shape, torch.bfloat16, device, 1, 1, (scores,), value_dim=RANK)
    chosen = attention_backend.choose_attention(setup)
    assert isinstance(chosen.ragged(), LatentAttention)
    assert why in chosen.reason
    with pytest.raises(attention_backend.AttentionUnavailable, match="attention is triton, but the decode kernel"):
        attention_backend.choose_attention(setup, "triton")


@pytest.mark.parametrize("tokens", [5, 20])
def test_what_is_not_finite_stays_with_those_who_see_it(tokens):
    cache, q, kv_up, starts, page_table, tables, lens = step(0, [(tokens, 8), (4, 0)])
    want = run(cache, q, kv_up, starts, page_table, lens)
    at = 8 + tokens // 2
    cache[tables[0][at // BLOCK], at % BLOCK, 0, 2] = torch.nan
    found = run(cache, q, kv_up, starts, page_table, lens)
    assert found[tokens // 2 : tokens].isnan().all()
    kept = [*range(tokens // 2), *range(tokens, tokens + 4)]
    torch.testing.assert_close(found[kept], want[kept])
