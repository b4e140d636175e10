"""The choice of an indexer: which tokens each query of sparse attention attends to (DeepSeek-V3.2, §2.1).

Of tokens with equal scores the first ones are chosen, however many others are in the step: `torch.topk`, which
transformers calls, takes any of them.

Tests: tests/ops/attention/test_indexer.py
"""

from __future__ import annotations

import torch

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


def seen_and_chosen(seen: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """What queries see `[tokens, places]`, of tokens at the chosen places `[tokens, top_k]` alone."""
    return torch.zeros_like(seen).scatter_(1, chosen.long(), True) & seen
