"""Bytes and FLOPs of kernel launches, counting every byte once, to express a measured time as a share of the
roofline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ...ops.lora.sgmv import Segments

_F32, _INT32 = 4, 4


@dataclass(frozen=True, slots=True)
class Cost:
    """Bytes and operations of a launch, counting every byte once."""

    bytes: int
    flops: int

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.bytes + other.bytes, self.flops + other.flops)


def shrink_cost(
    segments: Segments, layer: int, modules: Sequence[tuple[int, int, int]], d_in: int, splits: int, itemsize: int
) -> Cost:
    """bytes = Σ rank · d_in · size (A) + tokens · d_in · size (x, once) + splits · tokens · rank · 4 (h)
    flops = Σ 2 · tokens · rank · d_in, over segments and the modules that they target.
    """
    moved = flops = 0
    fed: set[int] = set()
    for begin, end, rows in segments:
        count = sum(rows.a_offset[module] >= 0 for module, _, _ in modules)
        if begin == end or not count or rows.first_elem[layer] < 0:
            continue
        fed.update(range(begin, end))
        moved += count * rows.rank * (d_in * itemsize + splits * (end - begin) * _F32)
        flops += 2 * count * (end - begin) * rows.rank * d_in
    return Cost(moved + len(fed) * d_in * itemsize, flops)


def expand_cost(
    segments: Segments, layer: int, modules: Sequence[tuple[int, int, int]], splits: int, itemsize: int
) -> Cost:
    """bytes = Σ rank · width · size (Bᵀ) + 2 · tokens · width · size (y, read and written) + splits · tokens · rank · 4
    flops = Σ 2 · tokens · rank · width, over segments and the modules that they target.
    """
    moved = flops = 0
    for begin, end, rows in segments:
        tokens = end - begin
        if not tokens or rows.first_elem[layer] < 0:
            continue
        for module, _, width in modules:
            if rows.b_offset[module] < 0:
                continue
            moved += (rows.rank + 2 * tokens) * width * itemsize + splits * tokens * rows.rank * _F32
            flops += 2 * tokens * rows.rank * width
    return Cost(moved, flops)


def attention_cost(
    lens: Sequence[int],
    num_heads: int,
    kv_heads: int,
    head_dim: int,
    block_tokens: int,
    itemsize: int,
    *,
    kv_itemsize: int = 0,
) -> Cost:
    """bytes: keys and values of every row's tokens, q read and the result written, the sequence's pages and its length.
    flops: 4 per query head, token and element.

    lens: tokens of each row. kv_itemsize: bytes of an element of keys and values; 0: `itemsize`.
    """
    tokens, pages = sum(lens), sum(-(-length // block_tokens) for length in lens)
    moved = 2 * head_dim * (tokens * kv_heads * (kv_itemsize or itemsize) + len(lens) * num_heads * itemsize)
    moved += (pages + 2 * len(lens)) * _INT32
    return Cost(moved, 4 * tokens * num_heads * head_dim)


def gemm_cost(tokens: int, d_in: int, d_out: int, itemsize: int, *, silu: bool = False) -> Cost:
    """bytes: the weight, x read and y written. flops: 2 per row and element of the weight, plus the activation's.
    d_out: columns of y, with `silu` half of the weight's rows.
    """
    rows = 2 * d_out if silu else d_out
    moved = rows * d_in + tokens * (d_in + d_out)
    return Cost(moved * itemsize, 2 * tokens * rows * d_in + 5 * silu * tokens * d_out)
