"""SGMV as it is defined, in float32, one token and one rank-row at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sgmv import Segments


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
        if adapter.first_slab[layer] < 0:
            continue
        for token in range(begin, end):
            for module, column, width in modules:
                a_offset, b_offset = adapter.a_offset[module], adapter.b_offset[module]
                if a_offset < 0:
                    continue
                delta = torch.zeros(width)
                for slab in range(adapter.first_slab[layer], adapter.first_slab[layer] + adapter.rank):
                    page = arena[adapter.pages[slab // adapter.slabs_per_page]].float()
                    start = slab % adapter.slabs_per_page * adapter.slab_elems
                    a = page[start + a_offset : start + a_offset + d_in]
                    b = page[start + b_offset : start + b_offset + width]
                    delta += (x[token].float() @ a) * b
                columns = slice(column, column + width)
                y[token, columns] = (y[token, columns].float() + adapter.scale * delta).to(y.dtype)
