"""The choice of blocks of keys, which sparse attention attends to (MiniMax-M3).

Of blocks with equal scores the first ones are chosen, as `indexer` chooses tokens.

Tests: tests/ops/attention/test_key_blocks.py
"""

from __future__ import annotations

import torch

from . import attention
from .attention import KeyBlocks


def halves_of(key: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A token's index key `[tokens, key]` as it is kept: `width` elements behind the keys of all heads, and as many
    behind their values, of which the last may be zeros.
    """
    first, second = torch.nn.functional.pad(key, (0, 2 * width - key.shape[1])).split(width, 1)
    return first, second


def chosen_blocks(q: torch.Tensor, keys: torch.Tensor, own: torch.Tensor, blocks: KeyBlocks) -> torch.Tensor:
    """The blocks of each query's highest scores; also unseen ones where it sees fewer. In float32.

    q: `[rows, tokens, heads, key]`; keys: `[rows, places, key]`, more than `top` blocks of them; own: the place of each
    query's token `[rows, tokens]`. Returns `[rows, tokens, heads, top]` int64.
    """
    rows, tokens, heads, dim = q.shape
    most = max(1, attention.MOST_SCORES // (rows * heads * keys.shape[1]))
    if tokens > most:
        parts = zip(q.split(most, dim=1), own.split(most, dim=1), strict=True)
        return torch.cat([chosen_blocks(part, keys, places, blocks) for part, places in parts], dim=1)
    places = torch.arange(keys.shape[1], device=q.device)
    scores = (q.float().reshape(rows, tokens * heads, dim) @ keys.float().transpose(1, 2)).view(rows, tokens, heads, -1)
    scores = scores.masked_fill_((places > own[..., None])[:, :, None], -torch.inf)
    pad = -keys.shape[1] % blocks.size
    scores = torch.nn.functional.pad(scores, (0, pad), value=-torch.inf).unflatten(-1, (-1, blocks.size)).amax(-1)
    last = own[:, :, None, None] // blocks.size - torch.arange(scores.shape[-1], device=q.device)
    scores = scores.masked_fill_((last >= 0) & (last < blocks.local), torch.inf)
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., : blocks.top]
