"""Elementwise parts of a decoder layer: norms, rotary embedding with the append to the KV cache, gated activation.

On a CPU by torch; on a GPU each is one pass of a kernel in `elementwise_triton`.
"""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch

from .rotation import HeadNorms, Rotation


@cache
def _kernels() -> ModuleType:
    from . import elementwise_triton  # needs triton

    return elementwise_triton


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x²) + eps) · weight` over the last dimension, statistics in float32.

    x: `[tokens, hidden]`; on a CPU any number of dimensions.
    """
    if x.is_cuda:
        return _kernels().rms_norm(x, weight, eps)
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """`residual += x` in place; returns the norm of the sum. x, residual: `[tokens, hidden]` of one dtype."""
    if x.is_cuda:
        return _kernels().add_rms_norm(x, residual, weight, eps)
    return rms_norm(residual.add_(x), weight, eps)


class RotaryEmbedding:
    """cos and sin of every position, in the model's dtype."""

    def __init__(
        self, inv_freq: torch.Tensor, num_positions: int, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        cos, sin = rotary_table(inv_freq, num_positions)
        self._cos, self._sin = cos.to(device, dtype), sin.to(device, dtype)

    def at(self, positions: torch.Tensor) -> Rotation:
        """positions: `[tokens]` int64. Gathered once a step on a CPU; a GPU's kernels find the rows themselves."""
        if positions.is_cuda:
            return Rotation(self._cos, self._sin, positions)
        return Rotation(self._cos[positions], self._sin[positions], None)


def rotary_table(inv_freq: torch.Tensor, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, each `[num_positions, 2·len(inv_freq)]` float32, of position · frequency."""
    angles = torch.outer(torch.arange(num_positions, dtype=torch.float32), inv_freq.float())
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def apply_rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate heads. x: `[tokens, heads, head_dim]`; cos, sin: `[tokens, 1, head_dim]` of x's dtype."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def rotate_and_write(
    qkv: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page: torch.Tensor,
    offset: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Normalise and rotate the heads of q and k, append k and v to the cache, return q `[tokens, heads, head_dim]`.

    qkv: `[tokens, (heads + 2 · kv_heads) · head_dim]`, packed. k_cache, v_cache: `[num_pages, block_tokens, kv_heads,
    head_dim]`, of one shape and the same strides. page, offset: `[tokens]` int64, where a token's k and v go; padding
    tokens point at the dummy page. out: of q's shape, contiguous, to write q to.
    """
    if qkv.is_cuda:
        return _kernels().rotate_and_write(qkv, rotation, norms, k_cache, v_cache, page, offset, out)
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
    return q if out is None else out.copy_(q)


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
    k, v: `[tokens, kv_heads, head_dim]`, rounded to the cache's dtype. page, offset: `[tokens]` int64. Padding tokens
    point at the dummy page.
    """
    k_cache[page, offset] = k.to(k_cache.dtype)
    v_cache[page, offset] = v.to(v_cache.dtype)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) · up` for packed `[tokens, 2·ffn]` → `[tokens, ffn]`."""
    if gate_up.is_cuda:
        return _kernels().silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
