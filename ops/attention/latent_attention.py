"""Attention over cached latents by PyTorch's operators; `latents` has the ways between heads and latents.

Tests: tests/ops/attention/test_latent_attention.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from . import attention
from .attention import PagedAttention, Prefill, Scores
from .latents import LatentHeads


class LatentAttention(PagedAttention):
    """Has keys and values made for chunks of many tokens; all other rows attend over latents themselves."""

    takes_blocks = False

    def _attend_latents(
        self, q: torch.Tensor, cache: torch.Tensor, heads: LatentHeads, out: torch.Tensor, scores: Scores
    ) -> None:
        scale = self._head_dim**-0.5 if scores.scale is None else scores.scale
        for prefill in self._prefills:
            own = q[prefill.tokens]
            kept = self._gather(cache, prefill.pages, prefill.kv_len).to(q.dtype)
            broken = self._broken(kept, kept)
            kept = kept if broken is None else kept.masked_fill(broken, 0)
            attend = self._made if len(own) >= heads.break_even else self._absorbed
            found = out[prefill.tokens]
            attend(own, kept, prefill, heads, scale, found)
            if broken is not None:
                seen = self._who_sees(broken, found.transpose(0, 1)[None].shape, None)
                found.masked_fill_(seen[0].transpose(0, 1), torch.nan)
        if count := len(self._decode_pages):
            first = self._first_decode_token
            kept = self._gather_decode(cache, q.dtype).view(count, -1, cache.shape[-1])
            rows = heads.absorb(q[first:], first)[:, :, None]
            found = _over_latents(rows, kept, heads.kv_rank, self._decode_mask(None)[:, 0], scale)
            heads.expand(found[:, :, 0], out[first:], first)

    @staticmethod
    def _absorbed(
        q: torch.Tensor, kept: torch.Tensor, prefill: Prefill, heads: LatentHeads, scale: float, out: torch.Tensor
    ) -> None:
        """Write a chunk's values `[tokens, heads, value]`. kept: `[1, 1, latents, kv_rank + rotated]`."""
        first = prefill.tokens.start
        rows = heads.absorb(q, first).transpose(0, 1)[None]
        found = _over_latents(rows, kept[0], heads.kv_rank, prefill.visible[None], scale)
        heads.expand(found[0].transpose(0, 1), out, first)

    @staticmethod
    def _made(
        q: torch.Tensor, kept: torch.Tensor, prefill: Prefill, heads: LatentHeads, scale: float, out: torch.Tensor
    ) -> None:
        """Likewise, of a chunk of many tokens."""
        latents, key = kept[0, 0].split((heads.kv_rank, heads.rotated_dim), 1)
        width = max(q.shape[2], heads.value_dim)
        mask = prefill.mask(attention.PLAIN)
        for own, keys, values in heads.made(latents.contiguous(), prefill.tokens.start):
            keys = torch.cat((keys, key.expand(len(keys), -1, -1)), dim=2)
            # kernels that make no scores want heads of one width
            padded = (pad(each, (0, width - each.shape[-1])) for each in (q[:, own].transpose(0, 1), keys, values))
            rows, keys, values = (each[None] for each in padded)
            found = scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
            )
            out[:, own] = found[0, ..., : heads.value_dim].transpose(0, 1)


def _over_latents(
    q: torch.Tensor, kept: torch.Tensor, kv_rank: int, visible: torch.Tensor, scale: float
) -> torch.Tensor:
    """q: `[rows, heads, tokens, kv_rank + rotated]`; kept: `[rows, latents, …]`; visible: `[rows, tokens, latents]`, or
    of one token for all. Returns `[rows, heads, tokens, kv_rank]`.
    """
    rows, heads, tokens, _ = q.shape
    most = max(1, attention.MOST_SCORES // (rows * heads * kept.shape[1]))
    if tokens > most:
        parts = zip(q.split(most, dim=2), visible.split(most, dim=1), strict=True)
        return torch.cat([_over_latents(own, kept, kv_rank, seen, scale) for own, seen in parts], dim=2)
    # the queries of all heads are rows of one product
    scores = (q.reshape(rows, heads * tokens, -1) @ kept.transpose(1, 2)).view(rows, heads, tokens, -1) * scale
    weights = scores.masked_fill_(~visible[:, None], -torch.inf).softmax(-1, dtype=torch.float32).to(q.dtype)
    return (weights.view(rows, heads * tokens, -1) @ kept[..., :kv_rank]).view(rows, heads, tokens, -1)
