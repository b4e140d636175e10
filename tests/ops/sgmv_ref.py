"""SGMV as it is defined, in float32, one rank-row of one segment at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chorus.ops.sgmv import Segments


def sgmv_ref(
    y: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    segments: Segments,
    layer: int,
    modules: Sequence[tuple[int, int, int]],
) -> None:
    """Same contract as `sgmv.sgmv`."""
    d_in = x.shape[1]
    for begin, end, adapter in segments:
        if adapter.first_elem[layer] < 0:
            continue
        for module, column, width in modules:
            a_offset, b_offset = adapter.a_offset[module], adapter.b_offset[module]
            if a_offset < 0:
                continue
            delta = torch.zeros(end - begin, width)
            for i in range(adapter.rank):
                slab = adapter.first_elem[layer] + i * adapter.slab_elems
                a = _row(arena, adapter.pages, slab + a_offset, d_in)
                b = _row(arena, adapter.pages, slab + b_offset, width)
                delta += (x[begin:end].float() @ a)[:, None] * b
            columns = slice(column, column + width)
            y[begin:end, columns] = (y[begin:end, columns].float() + adapter.scale * delta).to(y.dtype)


def _row(arena: torch.Tensor, pages: Sequence[int], start: int, width: int) -> torch.Tensor:
    """Elements `start … start + width` of an adapter that runs over `pages`, float32."""
    at = start + torch.arange(width)
    return arena[torch.tensor(pages)[at // arena.shape[1]], at % arena.shape[1]].float()
