"""Bytes and FLOPs of the fused elementwise launches, every byte once."""

from __future__ import annotations

from .sgmv_cost import Cost

_INT64 = 8


def norm_cost(tokens: int, width: int, itemsize: int, add: bool) -> Cost:
    """bytes: x read and y written, with `add` the residual read and written too, and the weight.
    flops: 4 per element (square, sum, scale, weight), 5 with `add`.
    """
    return Cost(((4 if add else 2) * tokens + 1) * width * itemsize, (5 if add else 4) * tokens * width)


def silu_cost(tokens: int, ffn: int, itemsize: int) -> Cost:
    """bytes: gate and up read, the product written. flops: 5 per element of it, an exponential and a division among
    them.
    """
    return Cost(3 * tokens * ffn * itemsize, 5 * tokens * ffn)


def rotary_cost(tokens: int, num_heads: int, kv_heads: int, head_dim: int, itemsize: int, norm: bool) -> Cost:
    """bytes: q, k and v read and written, half a row of cos and of sin and three int64 a token; the norms' weights.
    flops: 3 per element of q and k, 7 with norms.
    """
    rotated = (num_heads + kv_heads) * head_dim
    moved = tokens * (2 * (rotated + kv_heads * head_dim) * itemsize + head_dim * itemsize + 3 * _INT64)
    return Cost(moved + (2 * head_dim * itemsize if norm else 0), (7 if norm else 3) * tokens * rotated)
