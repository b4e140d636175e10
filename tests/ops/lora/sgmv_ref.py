"""SGMV as it is defined, in float32, one module of one segment at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from chorus.ops.lora.sgmv import Segments


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
            slabs = adapter.first_elem[layer] + adapter.slab_elems * torch.arange(adapter.rank)
            a = _rows(arena, adapter.pages, slabs + a_offset, d_in)
            b = _rows(arena, adapter.pages, slabs + b_offset, width)
            columns = slice(column, column + width)
            delta = x[begin:end].float() @ a.T @ b
            y[begin:end, columns] = (y[begin:end, columns].float() + adapter.scale * delta).to(y.dtype)


def _rows(arena: torch.Tensor, pages: Sequence[int], starts: torch.Tensor, width: int) -> torch.Tensor:
    """Elements `start … start + width` for each of `starts`, of an adapter that runs over `pages`, float32."""
    at = starts[:, None] + torch.arange(width)
    return arena[torch.tensor(pages)[at // arena.shape[1]], at % arena.shape[1]].float()
