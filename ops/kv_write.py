"""Append keys and values to the paged cache, rotated first: torch on a CPU, one Triton pass on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .norm import rms_norm
from .rope import Rotation, apply_rope


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """RMSNorm of every query and key head before it is rotated (Qwen3). q, k: `[head_dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    eps: float


def rotate_and_write(
    qkv: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
) -> torch.Tensor:
    """Normalise and rotate the heads of q and k, append k and v to the cache, return q `[tokens, heads, head_dim]`.

    qkv: `[tokens, (heads + 2 · kv_heads) · head_dim]`, packed. k_cache, v_cache: `[num_pages, block_tokens, kv_heads,
    head_dim]`, of one shape and the same strides. page, offset: `[tokens]` int64, where a token's k and v go; padding
    tokens point at the dummy page.
    """
    if qkv.is_cuda:
        from . import kv_write_triton

        return kv_write_triton.rotate_and_write(qkv, rotation, norms, k_cache, v_cache, page, offset)
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q, k, v = qkv.unflatten(1, (-1, head_dim)).split((num_heads, kv_heads, kv_heads), dim=1)
    if norms is not None:
        q, k = rms_norm(q, norms.q, norms.eps), rms_norm(k, norms.k, norms.eps)
    cos, sin = rotation.cos, rotation.sin
    if rotation.rows is not None:
        cos, sin = cos[rotation.rows], sin[rotation.rows]
    q, k = apply_rope(q, cos[:, None], sin[:, None]), apply_rope(k, cos[:, None], sin[:, None])
    write_kv(k_cache, v_cache, k, v, page, offset)
    return q


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
