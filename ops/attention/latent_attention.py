"""Attention over cached latents by PyTorch's operators; `latents` has the ways between heads and latents.

Tests: tests/ops/attention/test_latent_attention.py
"""

from __future__ import annotations

from functools import partial

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

from . import attention
from .attention import HeadTerms, PagedAttention, Prefill, Scores, attend_by_scores, weights_of
from .indexer import chosen_places, chosen_pools, seen_and_chosen
from .latents import LatentHeads


class LatentAttention(PagedAttention):
    """Has keys and values made for chunks of many tokens; all other rows attend over latents themselves."""

    supports_blocks = False
    supports_chosen = True

    def choose(
        self,
        q: torch.Tensor,
        weights: torch.Tensor,
        cache: torch.Tensor,
        top_k: int,
        out: torch.Tensor | None = None,
        biases: torch.Tensor | None = None,
    ) -> torch.Tensor:
        choose = chosen_places if biases is None else partial(chosen_pools, biases=biases)
        out = q.new_empty(len(q), top_k, dtype=torch.int32) if out is None else out
        for prefill in self._prefills:
            if prefill.kv_len > top_k:
                own, keys = prefill.tokens, self._gather(cache, prefill.pages, prefill.kv_len)[0]
                found = choose(q[own][None], weights[own][None], keys, prefill.visible[None], top_k)
                out[own, :top_k] = found[0].int()
        if len(self._decode_pages) and self._decode_places > top_k:
            first, seen = self._first_decode_token, self._decode_mask(None)[:, 0]
            for rows in self._decode_parts(max(q.shape[1], cache.shape[-1])):
                own, keys = slice(first + rows.start, first + rows.stop), self._decode_keys(cache, rows)
                found = choose(q[own, None], weights[own, None], keys, seen[rows], top_k)
                out[own, :top_k] = found[:, 0].int()
        return out

    def _attend_latents(
        self,
        q: torch.Tensor,
        cache: torch.Tensor,
        heads: LatentHeads,
        out: torch.Tensor,
        scores: Scores,
        chosen: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:
        scale, top_k = self._head_dim**-0.5 if scores.scale is None else scores.scale, scores.top_k
        window = scores.window
        for prefill in self._prefills:
            own = q[prefill.tokens]
            kept = self._gather(cache, prefill.pages, prefill.kv_len).to(q.dtype)
            broken = self._broken(kept, kept)
            kept = kept if broken is None else kept.masked_fill(broken, 0)
            attend = self._made if len(own) >= heads.break_even else self._absorbed
            found, seen = out[prefill.tokens], None if window is None else prefill.seen(window)
            if chosen is not None and top_k is not None and prefill.kv_len > top_k:
                seen = seen_and_chosen(prefill.visible, chosen[prefill.tokens, :top_k])
            attend(own, kept, prefill, heads, scale, found, seen, sinks)
            if broken is not None:
                seen = self._who_sees(broken, found.transpose(0, 1)[None].shape, window)
                found.masked_fill_(seen[0].transpose(0, 1), torch.nan)
        if count := len(self._decode_pages):
            first, seen = self._first_decode_token, self._decode_mask(window)[:, 0]
            if chosen is not None and top_k is not None and self._decode_places > top_k:
                kept, seen = self._gather_chosen(cache, chosen[first:, :top_k].long(), q.dtype)
            else:
                kept = self._gather_decode(cache, q.dtype).view(count, -1, cache.shape[-1])
            rows = heads.absorb(q[first:], first)[:, :, None]
            found = _over_latents(rows, kept, heads.kv_rank, seen, scale, sinks)
            heads.expand(found[:, :, 0], out[first:], first)

    def _gather_chosen(
        self, cache: torch.Tensor, places: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The decode rows' cache at chosen places `[rows, top_k]`: `[rows, top_k, elems]` in `dtype`, zero where a row
        sees nothing, and whether it sees each of them, `[rows, 1, top_k]`.
        """
        inside = places < self._decode_places  # a pool may go on behind the last one
        places = places.clamp(max=self._decode_places - 1)
        seen = self._decode_mask(None)[:, 0, 0].gather(1, places) & inside
        pages = self._decode_pages.gather(1, places // self._block_tokens)
        kept = cache[pages, places % self._block_tokens][:, :, 0].to(dtype)
        return kept.masked_fill_(~seen[..., None], 0), seen[:, None]

    @staticmethod
    def _absorbed(
        q: torch.Tensor,
        kept: torch.Tensor,
        prefill: Prefill,
        heads: LatentHeads,
        scale: float,
        out: torch.Tensor,
        seen: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Write a chunk's values `[tokens, heads, value]`. kept: `[1, 1, latents, kv_rank + rotated]`. seen: what its
        tokens attend to, where that is not all that they see. sinks: see `Attention.run`.
        """
        first = prefill.tokens.start
        rows = heads.absorb(q, first).transpose(0, 1)[None]
        seen = prefill.visible if seen is None else seen
        found = _over_latents(rows, kept[0], heads.kv_rank, seen[None], scale, sinks)
        heads.expand(found[0].transpose(0, 1), out, first)

    @staticmethod
    def _made(
        q: torch.Tensor,
        kept: torch.Tensor,
        prefill: Prefill,
        heads: LatentHeads,
        scale: float,
        out: torch.Tensor,
        seen: torch.Tensor | None,
        sinks: torch.Tensor | None,
    ) -> None:
        """Write the values of a chunk of many tokens; see `_absorbed`."""
        latents, key = kept[0, 0].split((heads.kv_rank, heads.rotated_dim), 1)
        width = max(q.shape[2], heads.value_dim)
        mask = prefill.mask(attention.PLAIN) if seen is None else seen
        for own, keys, values in heads.made(latents.contiguous(), prefill.tokens.start):
            keys = torch.cat((keys, key.expand(len(keys), -1, -1)), dim=2)
            if sinks is not None:
                rows, terms = q[:, own].transpose(0, 1), HeadTerms(sinks[own])
                visible = prefill.visible if seen is None else seen
                found = attend_by_scores(rows[None], keys[None], values[None], visible, Scores(scale), terms, None)
                out[:, own] = found[0].transpose(0, 1)
                continue
            # kernels that make no scores want heads of one width
            padded = (pad(each, (0, width - each.shape[-1])) for each in (q[:, own].transpose(0, 1), keys, values))
            rows, keys, values = (each[None] for each in padded)
            found = scaled_dot_product_attention(
                rows, keys, values, attn_mask=mask, is_causal=mask is None, scale=scale
            )
            out[:, own] = found[0, ..., : heads.value_dim].transpose(0, 1)


def _over_latents(
    q: torch.Tensor,
    kept: torch.Tensor,
    kv_rank: int,
    visible: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """q: `[rows, heads, tokens, kv_rank + rotated]`; kept: `[rows, latents, …]`; visible: `[rows, tokens, latents]`, or
    of one token for all; sinks: `[heads]`. Returns `[rows, heads, tokens, kv_rank]`.
    """
    rows, heads, tokens, _ = q.shape
    most = max(1, attention.MOST_SCORES // (rows * heads * kept.shape[1]))
    if tokens > most:
        parts = zip(q.split(most, dim=2), visible.split(most, dim=1), strict=True)
        return torch.cat([_over_latents(own, kept, kv_rank, seen, scale, sinks) for own, seen in parts], dim=2)
    # the queries of all heads are rows of one product
    scores = (q.reshape(rows, heads * tokens, -1) @ kept.transpose(1, 2)).view(rows, heads, tokens, -1) * scale
    weights = weights_of(scores.masked_fill_(~visible[:, None], -torch.inf), sinks).to(q.dtype)
    return (weights.view(rows, heads * tokens, -1) @ kept[..., :kv_rank]).view(rows, heads, tokens, -1)
