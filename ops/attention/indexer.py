"""The choice of an indexer: which tokens each query of sparse attention attends to (DeepSeek-V3.2, §2.1).

Of tokens with equal scores the first ones are chosen, however many others are in the step: `torch.topk`, which
transformers calls, takes any of them.

Tests: tests/ops/attention/test_indexer.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from . import attention


def chosen_places(
    q: torch.Tensor, weights: torch.Tensor, keys: torch.Tensor, seen: torch.Tensor, top_k: int
) -> torch.Tensor:
    """The `top_k` places of each query's highest scores, rising; also unseen ones where it sees fewer. In float32.

    q: `[rows, tokens, heads, key]`; weights: `[rows, tokens, heads]`; keys: `[rows, places, key]`, more than `top_k`;
    seen: `[rows, tokens, places]`, or of one token for all. Returns `[rows, tokens, top_k]` int64.
    """
    rows, tokens, heads, dim = q.shape
    most = max(1, attention.MOST_SCORES // (heads * keys.shape[1]))
    if rows > most:
        parts = zip(q.split(most), weights.split(most), keys.split(most), seen.split(most), strict=True)
        return torch.cat([chosen_places(*own, top_k) for own in parts])
    if tokens > (most := max(1, most // rows)):
        seen = seen.expand(-1, tokens, -1)
        of_tokens = zip(q.split(most, dim=1), weights.split(most, dim=1), seen.split(most, dim=1), strict=True)
        return torch.cat([chosen_places(*own[:2], keys, own[2], top_k) for own in of_tokens], dim=1)
    # the queries of all heads are rows of one product
    products = q.float().reshape(rows, tokens * heads, dim) @ keys.float().transpose(1, 2)
    products = products.mul_(dim**-0.5).relu_().view(rows, tokens, heads, -1)
    scores = (weights.float() * heads**-0.5).unsqueeze(2) @ products
    scores = scores.squeeze(2).masked_fill_(~seen, -torch.inf)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :top_k].sort(dim=-1).values


def chosen_pools(
    q: torch.Tensor, weights: torch.Tensor, kept: torch.Tensor, seen: torch.Tensor, top_k: int, biases: torch.Tensor
) -> torch.Tensor:
    """As `chosen_places`, of pools of neighbouring tokens: each query's whole pools with the highest scores, and the
    tokens behind its last whole pool; also unseen places, which may be behind the last one. See `IndexerSpec.pool`.

    kept: `[rows, places, 2 · key]`, keys and their gates; biases: `[size, key]`. `top_k` is a multiple of the size, and
    the size less one.
    """
    size = len(biases)
    keys = _keys_of_pools(kept, biases)
    whole = seen.sum(-1, keepdim=True) // size  # of each query, and the number of the pool behind them
    is_whole = torch.arange(keys.shape[1], device=kept.device) < whole
    pools = chosen_places(q, weights, keys, is_whole, top_k // size)
    pools = pools + (pools >= whole)  # of queries that see fewer: pools behind that one
    pools = torch.cat((pools, whole.expand(*pools.shape[:2], 1)), -1).sort(-1).values
    places = pools[..., None] * size + torch.arange(size, device=kept.device)
    return places.flatten(-2)[..., :top_k]  # no query sees the last place of all


def _keys_of_pools(kept: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """`[rows, pools, key]`, with one pool more than there are whole ones; those that are not whole are of no use."""
    size = len(biases)
    count = kept.shape[1] // size + 1
    keys, gates = pad(kept.float(), (0, 0, 0, count * size - kept.shape[1])).unflatten(1, (count, size)).chunk(2, -1)
    return ((gates + biases).softmax(2) * keys).sum(2)


def seen_and_chosen(seen: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What queries see `[tokens, places]`, of tokens at the chosen places `[tokens, top_k]` alone."""
    count = seen.shape[1]
    found = seen.new_zeros(len(seen), count + 1).scatter_(1, chosen.long().clamp(max=count), True)
    return found[:, :count] & seen
