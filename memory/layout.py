"""How bytes lie in a page: KV of a few tokens for all layers, or whole rank-rows ("slabs") of one adapter.

Pure arithmetic, no tensors, so that the simulator and the allocator studies use the very numbers that serving uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

ROW_ALIGNMENT_BYTES = 16

#: The projections that an adapter may target, in slab order. A module's index in this tuple is its id everywhere.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

#: (in_features, out_features) per module name.
ModuleDims = Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class PageLayout:
    """One page as KV cache: `[num_layers, 2, block_tokens, kv_heads, head_dim]` page-outermost (Punica §5.4)."""

    num_layers: int
    kv_heads: int
    head_dim: int
    block_tokens: int
    itemsize: int

    @property
    def kv_elems_per_token(self) -> int:
        return self.num_layers * 2 * self.kv_heads * self.head_dim

    @property
    def page_elems(self) -> int:
        return self.block_tokens * self.kv_elems_per_token

    @property
    def page_bytes(self) -> int:
        return self.page_elems * self.itemsize

    def pages_for_tokens(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_tokens)

    @classmethod
    def fitting(
        cls, num_layers: int, kv_heads: int, head_dim: int, block_tokens: int, itemsize: int, dims: ModuleDims
    ) -> PageLayout:
        """The layout with `block_tokens` doubled until a page holds the slab of an adapter that targets every module.

        Only very shallow models need it: a page grows with the layers, a slab does not.
        """
        layout = cls(num_layers, kv_heads, head_dim, block_tokens, itemsize)
        slab = SlabLayout.build(dims, MODULES, layout.page_elems, itemsize, check=False)
        while layout.page_elems < slab.slab_elems or layout.page_bytes % ROW_ALIGNMENT_BYTES:
            layout = cls(num_layers, kv_heads, head_dim, layout.block_tokens * 2, itemsize)
        return layout


@dataclass(frozen=True)
class SlabLayout:
    """One adapter's slab: for every targeted projection, row i of A (`in` elems), then row i of Bᵀ (`out` elems).

    a_offset, b_offset: elements from the slab's start to the row, per module id; -1 where the module is not targeted.
    Rows start on 16-byte boundaries and no slab straddles a page, so a page holds `slabs_per_page` whole slabs and
    slab `layer_index * rank + i` is rank-row i of the adapter's layer (layer-major).
    """

    a_offset: tuple[int, ...]
    b_offset: tuple[int, ...]
    slab_elems: int
    page_elems: int

    @cached_property
    def slabs_per_page(self) -> int:
        return self.page_elems // self.slab_elems

    def pages_for(self, num_slabs: int) -> int:
        return -(-num_slabs // self.slabs_per_page)

    @classmethod
    def build(
        cls, dims: ModuleDims, targets: Sequence[str], page_elems: int, itemsize: int, *, check: bool = True
    ) -> SlabLayout:
        """Lay out `targets` (module names) in module order. ValueError when a page can't hold one slab."""
        step = max(1, ROW_ALIGNMENT_BYTES // itemsize)
        offset = 0
        a_offset, b_offset = [], []
        for name in MODULES:
            if name not in targets:
                a_offset.append(-1)
                b_offset.append(-1)
                continue
            d_in, d_out = dims[name]
            a_offset.append(offset)
            offset += -(-d_in // step) * step
            b_offset.append(offset)
            offset += -(-d_out // step) * step
        if check and offset > page_elems:
            raise ValueError(
                f"one rank-row takes {offset * itemsize} bytes, a page only holds {page_elems * itemsize}; "
                "raise block_tokens"
            )
        return cls(tuple(a_offset), tuple(b_offset), offset, page_elems)
