"""Latent attention's two ways around the cache against keys and values that are made, with adapters and vectors."""

from __future__ import annotations

import random

import pytest
import torch

from chorus.ops.attention import latents as ways
from chorus.ops.attention.latents import AbsorbedLora, LatentHeads, absorbed, expanded
from chorus.ops.lora.sgmv import AdapterRows, Segments
from chorus.ops.lora.vectors import stride_of

HEADS, KEY, VALUE, RANK = 3, 6, 5, 16
WIDTH = HEADS * (KEY + VALUE)

close = {"rtol": 1e-4, "atol": 1e-4}


def weights(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(WIDTH, RANK, generator=generator)


def test_scores_and_values_are_those_of_keys_and_values():
    generator = torch.Generator().manual_seed(0)
    kv_up, latents = weights(generator), torch.randn(7, RANK, generator=generator)
    q, shares = torch.randn(4, HEADS, KEY, generator=generator), torch.rand(4, HEADS, 7, generator=generator)
    keys, values = (latents @ kv_up.T).view(7, HEADS, -1).split((KEY, VALUE), 2)
    scores = torch.einsum("thr,lr->thl", absorbed(q, kv_up), latents)
    torch.testing.assert_close(scores, torch.einsum("thk,lhk->thl", q, keys), **close)
    found = expanded(torch.einsum("thl,lr->thr", shares, latents), kv_up, KEY)
    torch.testing.assert_close(found, torch.einsum("thl,lhv->thv", shares, values), **close)


class Adapters:
    """Adapters in an arena of small pages, and the weights that each makes of kv_b_proj's."""

    def __init__(self, seed: int) -> None:
        self.rng, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.arena = torch.full((400, 48), float("nan"))
        self.free = list(range(400))
        self.rng.shuffle(self.free)

    def place(self, values: torch.Tensor) -> list[int]:
        pages = [self.free.pop() for _ in range(-(-len(values) // 48))]
        run = torch.zeros(len(pages) * 48)
        run[: len(values)] = values
        self.arena[pages] = run.view(-1, 48)
        return pages

    def lora(self, rank: int) -> tuple[AdapterRows, torch.Tensor]:
        """Rank-rows of A and of Bᵀ, and scale · B · A."""
        a, b = torch.randn(rank, RANK, generator=self.generator), torch.randn(rank, WIDTH, generator=self.generator)
        scale, pages = self.rng.choice((0.5, 2.0)), self.place(torch.cat((a, b), 1).flatten())
        return AdapterRows(pages, rank, scale, RANK + WIDTH, [0], [RANK], [0]), scale * b.T @ a

    def vectors(self, undone: bool) -> tuple[AdapterRows, torch.Tensor]:
        """Scales of the outputs, and those."""
        scales = torch.rand(WIDTH, generator=self.generator) + 0.5
        values = torch.zeros(2 * stride_of(WIDTH, 4))
        values[:WIDTH] = scales
        pages = self.place(values)
        return AdapterRows(pages, 0, -1.0 if undone else 1.0, 0, [-1], [-1], [0], vectors=[[0]]), scales


def random_step(it: Adapters, kv_up: torch.Tensor) -> tuple[Segments, torch.Tensor]:
    """Segments of a step, and kv_b_proj's weights for each of its tokens."""
    segments, begin = Segments(), 0
    tokens = it.rng.randint(1, 50)
    whole = kv_up.expand(tokens, -1, -1).clone()  # of each token
    while begin < tokens:
        end = min(tokens, begin + it.rng.choice((1, 1, 2, 9, 20)))
        if it.rng.random() < 0.3:
            rows, scales = it.vectors(undone=True)
            segments.add(begin, end, rows)
            whole[begin:end] /= scales[:, None]
        for _ in range(it.rng.randint(0, 2)):
            rows, added = it.lora(it.rng.randint(1, 20))
            segments.add(begin, end, rows)
            whole[begin:end] += added
        if it.rng.random() < 0.3:
            rows, scales = it.vectors(undone=False)
            segments.add(begin, end, rows)
            whole[begin:end] *= scales[:, None]
        begin = end
    return segments, whole


@pytest.mark.parametrize("seed", range(30))
def test_adapters_are_added_and_scaled_as_in_their_weights(seed):
    it = Adapters(seed)
    kv_up = weights(it.generator)
    segments, whole = random_step(it, kv_up)
    tokens = len(whole)
    lora = AbsorbedLora(it.arena, segments, 0, 0, WIDTH)
    q, x = (torch.randn(tokens, HEADS, width, generator=it.generator) for width in (KEY, RANK))
    keys, values = whole.view(tokens, HEADS, -1, RANK).split((KEY, VALUE), 2)
    found = lora.absorb(q, lambda rows: absorbed(rows, kv_up))
    torch.testing.assert_close(found, torch.einsum("thk,thkr->thr", q, keys), rtol=1e-3, atol=1e-3)
    found = lora.expand(x, lambda rows: expanded(rows, kv_up, KEY))
    torch.testing.assert_close(found, torch.einsum("thr,thvr->thv", x, values), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("at_once", [1, 1 << 20])
@pytest.mark.parametrize("seed", range(10))
def test_keys_and_values_are_made_for_the_adapters_of_a_token(seed, at_once, monkeypatch):
    """And queries of some of a step's tokens are those of all."""
    monkeypatch.setattr(ways, "_MADE", at_once)
    it = Adapters(seed)
    kv_up = weights(it.generator)
    segments, whole = random_step(it, kv_up)
    heads = LatentHeads(kv_up, HEADS, KEY, 2, AbsorbedLora(it.arena, segments, 0, 0, WIDTH))
    kept, token = torch.randn(9, RANK, generator=it.generator), it.rng.randrange(len(whole))
    parts = list(heads.made(kept, token))
    assert len(parts) == (HEADS if at_once == 1 else 1)
    found = torch.cat([torch.cat((keys, values), 2) for _, keys, values in parts])
    want = (kept @ whole[token].T).unflatten(1, (HEADS, -1)).transpose(0, 1)
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    q, first = torch.randn(len(whole), HEADS, KEY + 2, generator=it.generator), len(whole) // 2
    torch.testing.assert_close(heads.absorb(q[first:], first), heads.absorb(q)[first:], rtol=1e-3, atol=1e-3)
    x = torch.randn(len(whole), HEADS, RANK, generator=it.generator)
    whole_values, values = (torch.empty(len(rows), HEADS, heads.value_dim) for rows in (x, x[first:]))
    heads.expand(x, whole_values)
    heads.expand(x[first:], values, first)
    torch.testing.assert_close(values, whole_values[first:], rtol=1e-3, atol=1e-3)
