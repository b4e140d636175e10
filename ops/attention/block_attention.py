"""Grouped-query attention to chosen blocks of keys, by PyTorch's operators; `key_blocks` chooses them.

Tests: tests/ops/attention/test_key_blocks.py
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn.functional import scaled_dot_product_attention

from ..upload import on_device
from . import attention
from .attention import KeyBlocks, KeysOf, KvCache, PagedAttention, Prefill, Scores
from .key_blocks import chosen_blocks
from .mean_blocks import chosen_means


class BlockAttention(PagedAttention):
    """Chunks make masks of what is chosen; rows of one token read the chosen blocks alone."""

    supports_blocks = False
    supports_chosen = True

    def choose_blocks(self, q: torch.Tensor, cache: KvCache, blocks: KeyBlocks) -> torch.Tensor:
        found = q.new_zeros(*q.shape[:2], blocks.top, dtype=torch.long)
        for tokens, rows, keys, own in self._index_keys(q, cache, blocks.size * blocks.top):
            found[tokens] = chosen_blocks(rows, keys, own, blocks).flatten(0, 1)
        return found

    def choose_means(self, q: torch.Tensor, cache: KvCache, blocks: KeyBlocks, keys_of: KeysOf) -> torch.Tensor:
        found = q.new_zeros(len(q), self._kv_heads, blocks.top + 1, dtype=torch.long)
        for tokens, rows, keys, own in self._index_keys(q, cache, blocks.size * (blocks.top + 1) - 1):
            found[tokens] = chosen_means(rows, keys, own, blocks, keys_of).flatten(0, 1)[:, None]
        return found

    def _index_keys(
        self, q: torch.Tensor, cache: KvCache, top: int
    ) -> Iterator[tuple[slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Of rows with more than `top` tokens: the step's tokens, their queries `[rows, tokens, heads, key]`, the
        indexer's keys `[rows, places, key]`, and the place of each token.
        """
        dim = q.shape[2]
        for prefill in self._prefills:
            if prefill.kv_len > top:
                parts = (self._gather(each, prefill.pages, prefill.kv_len)[0] for each in (cache.k, cache.v))
                keys = torch.cat([each.transpose(0, 1).flatten(1) for each in parts], 1)[None, :, :dim]
                yield prefill.tokens, q[prefill.tokens][None], keys, prefill.own
        if len(self._decode_pages) and self._decode_places > top:
            own = on_device(self._decode_lens - 1, self._device)
            for rows in self._decode_parts(max(q.shape[1:])):
                keys = torch.cat([self._decode_keys(each, rows) for each in (cache.k, cache.v)], 2)[..., :dim]
                tokens = slice(self._first_decode_token + rows.start, self._first_decode_token + rows.stop)
                yield tokens, q[tokens, None], keys, own[rows]

    def _attend_blocks(
        self, q: torch.Tensor, cache: KvCache, out: torch.Tensor, scores: Scores, chosen: torch.Tensor
    ) -> None:
        assert scores.top_k is not None, "layers with blocks say how many keys are chosen"
        for prefill in self._prefills:
            self._of_chunk(q[prefill.tokens], cache, out[prefill.tokens], prefill, scores, chosen[prefill.tokens])
        if len(self._decode_pages):
            first = self._first_decode_token
            is_short = self._decode_places <= scores.top_k
            self._of_rows(q[first:], cache, out[first:], scores, None if is_short else chosen[first:])

    def _of_chunk(
        self,
        q: torch.Tensor,
        cache: KvCache,
        out: torch.Tensor,
        prefill: Prefill,
        scores: Scores,
        chosen: torch.Tensor,
    ) -> None:
        """Write what a row's last tokens attend to, some of them at a time. chosen: `[tokens, kv_heads, top]`."""
        k, v = (self._gather(each, prefill.pages, prefill.kv_len)[0].to(q.dtype) for each in (cache.k, cache.v))
        if (broken := self._broken(k, v)) is not None:
            k, v = k.masked_fill(broken, 0), v.masked_fill(broken, 0)
        count = -(-prefill.kv_len // scores.key_block)
        most = max(1, attention.MOST_SCORES // (self._kv_heads * prefill.kv_len))
        for first in range(0, len(q), most):
            own = slice(first, first + most)
            seen = prefill.visible[own].expand(self._kv_heads, -1, -1)
            if scores.top_k is not None and prefill.kv_len > scores.top_k:
                picked = torch.zeros(*chosen[own].shape[:2], count + 1, dtype=torch.bool, device=q.device)
                picked = picked.scatter_(2, chosen[own], True)[..., :count].repeat_interleave(scores.key_block, 2)
                seen = seen & picked[..., : prefill.kv_len].transpose(0, 1)
            found = _of_groups(q[own].transpose(0, 1), k, v, seen, scores.scale)
            if broken is not None:
                lost = (broken.transpose(1, 2) & seen).any(-1, keepdim=True)
                found = found.masked_fill(lost.repeat_interleave(q.shape[1] // self._kv_heads, 0), torch.nan)
            out[own] = found.transpose(0, 1)

    def _of_rows(
        self, q: torch.Tensor, cache: KvCache, out: torch.Tensor, scores: Scores, chosen: torch.Tensor | None
    ) -> None:
        """Write what rows of one token attend to. chosen: `[rows, kv_heads, top]`; None: all that they see."""
        rows, heads = len(q), self._kv_heads
        places = torch.arange(self._decode_places, device=q.device).expand(rows, heads, -1)
        if chosen is not None:
            inner = torch.arange(scores.key_block, device=q.device)
            places = (chosen[..., None] * scores.key_block + inner).flatten(2)
        inside = places.clamp(max=self._decode_places - 1)
        seen = (places == inside) & self._decode_mask(None)[:, 0].expand(-1, heads, -1).gather(2, inside)
        pages = self._decode_pages[:, None].expand(-1, heads, -1).gather(2, inside // self._block_tokens)
        at = pages, inside % self._block_tokens, torch.arange(heads, device=q.device)[:, None]
        k, v = (each[at].to(q.dtype).masked_fill_(~seen[..., None], 0).flatten(0, 1) for each in (cache.k, cache.v))
        found = _of_groups(q.reshape(-1, 1, q.shape[2]), k, v, seen.flatten(0, 1)[:, None], scores.scale)
        out.copy_(found.view(out.shape))


def _of_groups(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attention of heads `[groups · heads, tokens, head_dim]` of q, in q's shape. k, v: `[groups, keys, head_dim]`;
    seen: `[groups, tokens, keys]`.
    """
    rows = q.unflatten(0, (len(k), -1))
    found = scaled_dot_product_attention(
        rows, k[:, None], v[:, None], attn_mask=seen[:, None], scale=scale, enable_gqa=rows.shape[1] > 1
    )
    return found.flatten(0, 1)
