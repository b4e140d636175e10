"""The arena: one device buffer that holds the KV cache and all resident adapters."""

from __future__ import annotations

import torch

from . import hugepages
from .layout import PageLayout


class Arena:
    """`num_pages` pages of `layout.page_elems` elements of the model's dtype. KV may be in FP8, in the same memory."""

    def __init__(
        self,
        layout: PageLayout,
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device | str,
        pages: torch.Tensor | None = None,
    ) -> None:
        """pages: zeroed memory to use instead of allocating some."""
        if dtype.itemsize != layout.itemsize:
            raise ValueError(f"layout counts {layout.itemsize} bytes per element, {dtype} has {dtype.itemsize}")
        self.layout = layout
        self.num_pages = num_pages
        shape = (num_pages, layout.page_elems)
        if pages is not None:
            self.pages = pages.view(shape)
        elif torch.device(device).type == "cpu":
            self.pages = hugepages.zeros(shape, dtype)  # the system provides its memory page by page on first use
        else:
            self.pages = torch.zeros(shape, dtype=dtype, device=device)
        kv = self.pages.view(torch.float8_e4m3fn) if layout.float8_kv else self.pages
        indices = {layer: at for group in layout.groups for at, layer in enumerate(group.layers)}
        self.kv_layers = [_kv_of(kv, layout, layer, indices[layer]) for layer in range(layout.num_layers)]
        """K and V of each layer: strided views `[num_pages, block_tokens, kv_heads, head_dim]` of the pages. V has
        fewer elements of a head where it is part of K.
        """


def _kv_of(kv: torch.Tensor, layout: PageLayout, layer: int, index: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a layer, the given one of its group."""
    shape = layout.layer_shapes[layer]
    size = layout.block_tokens * shape.elems
    firsts = (layout.kv_parts * index * size + part * size for part in range(layout.kv_parts))
    dims = layout.block_tokens, shape.heads, shape.head_dim
    parts = [kv[:, first : first + size].view(len(kv), *dims) for first in firsts]
    return parts[0], parts[-1][..., : layout.value_dim]
