"""The choice of blocks of keys by the mean of each block's, which sparse attention attends to (Qwen4-Exp).

Of blocks with equal scores the first ones are chosen, as `indexer` chooses tokens.

Tests: tests/ops/attention/test_mean_blocks.py
"""

from __future__ import annotations

import torch

from . import attention
from .attention import KeyBlocks, KeysOf


def chosen_means(
    q: torch.Tensor, kept: torch.Tensor, own: torch.Tensor, blocks: KeyBlocks, keys_of: KeysOf
) -> torch.Tensor:
    """The whole blocks of each query's highest scores, in float32, and the one behind the last whole one. A number that
    no block has stands for each that there is not.

    q: `[rows, tokens, heads, key]`; kept: a key of each token, `[rows, places, key]`; own: the place of each query's
    token `[rows, tokens]`. Returns `[rows, tokens, top + 1]` int64.
    """
    rows, places, dim = kept.shape
    count = places // blocks.size
    means = kept[:, : count * blocks.size].float().unflatten(1, (count, blocks.size)).mean(2).to(kept.dtype)
    firsts = torch.arange(count, device=q.device) * blocks.size
    keys = keys_of(means.flatten(0, 1), firsts.repeat(rows)).view(rows, count, dim)
    most = max(1, attention.MOST_SCORES // max(1, rows * q.shape[2] * count))
    parts = zip(q.split(most, dim=1), own.split(most, dim=1), strict=True)
    return torch.cat([_chosen(some, keys, at, blocks, -(-places // blocks.size)) for some, at in parts], dim=1)


def _chosen(q: torch.Tensor, keys: torch.Tensor, own: torch.Tensor, blocks: KeyBlocks, none: int) -> torch.Tensor:
    """none: the number of no block."""
    rows, tokens, heads, dim = q.shape
    products = q.float().reshape(rows, tokens * heads, dim) @ keys.float().transpose(1, 2)
    scores = products.relu_().view(rows, tokens, heads, -1).sum(2) * dim**-0.5
    seen = (own + 1)[..., None]
    is_whole = torch.arange(scores.shape[-1], device=q.device) < seen // blocks.size
    best = scores.masked_fill_(~is_whole, -torch.inf).sort(dim=-1, descending=True, stable=True)
    found = best.indices.masked_fill(best.values == -torch.inf, none)[..., : blocks.top]
    behind = torch.where(seen % blocks.size == 0, none, seen // blocks.size)
    return torch.cat((found, behind), -1)
