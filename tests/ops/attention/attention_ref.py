"""Paged attention as it is defined, one token at a time, in float32; other implementations are compared with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chorus.ops.attention.attention import PLAIN, Scores


def paged_attention_ref(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    qo_indptr: Sequence[int],
    block_tables: Sequence[Sequence[int]],
    kv_lens: Sequence[int],
    how: Scores = PLAIN,
    *,
    chunked: bool = False,
) -> torch.Tensor:
    """Causal attention of each row's last `qo_len` tokens over its `kv_len` cached ones.

    q: `[tokens, heads, head_dim]`; caches `[num_pages, block_tokens, kv_heads, head_dim]`; row i's tokens are
    `qo_indptr[i]:qo_indptr[i+1]`, its pages `block_tables[i]`. how: the scale, window and soft cap. chunked: the
    window begins at a multiple of its length. Returns `[tokens, heads, …]`, of as many elements as a value has.
    """
    block_tokens, group = k_cache.shape[1], q.shape[1] // k_cache.shape[2]
    out = q.new_empty(*q.shape[:2], v_cache.shape[-1])
    for row, (table, kv_len) in enumerate(zip(block_tables, kv_lens, strict=True)):
        first, last = qo_indptr[row], qo_indptr[row + 1]
        for t in range(first, last):
            visible = kv_len - (last - 1 - t)
            begin = 0 if how.window is None else max(0, visible - how.window)
            if chunked and how.window is not None:
                begin = (visible - 1) // how.window * how.window
            slots = [(table[s // block_tokens], s % block_tokens) for s in range(begin, visible)]
            k = torch.stack([k_cache[p, o] for p, o in slots]).float().repeat_interleave(group, dim=1)
            v = torch.stack([v_cache[p, o] for p, o in slots]).float().repeat_interleave(group, dim=1)
            scores = torch.einsum("hd,shd->hs", q[t].float(), k) * (how.scale or q.shape[-1] ** -0.5)
            if how.softcap is not None:
                scores = how.softcap * torch.tanh(scores / how.softcap)
            out[t] = torch.einsum("hs,shd->hd", scores.softmax(-1), v).to(q.dtype)
    return out
