"""Append keys and values to the paged cache."""

from __future__ import annotations

import torch


def write_kv(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
) -> None:
    """`cache[page[t], offset[t]] = k[t]` for every token t.

    k_cache, v_cache: `[num_pages, block_tokens, kv_heads, head_dim]`, any strides.
    k, v: `[tokens, kv_heads, head_dim]`. page, offset: `[tokens]` int64. Padding tokens point at the dummy page.
    """
    k_cache[page, offset] = k
    v_cache[page, offset] = v
