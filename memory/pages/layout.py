"""Layouts of pages: KV of a few tokens for all layers, or a run of rank-rows ("slabs") of one adapter.

Pure arithmetic, no tensors, so that the simulator and the allocator studies use the very numbers that serving uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ROW_ALIGNMENT_BYTES = 16

#: The projections that an adapter may target, in slab order. A module's index in this tuple is its id everywhere.
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

#: (in_features, out_features) per module name.
ModuleDims = Mapping[str, tuple[int, int]]


def module_dims(hidden: int, ffn: int, q_size: int, kv_size: int) -> ModuleDims:
    """Dimensions of every projection that an adapter may target."""
    return {
        "q_proj": (hidden, q_size), "k_proj": (hidden, kv_size), "v_proj": (hidden, kv_size),
        "o_proj": (q_size, hidden), "gate_proj": (hidden, ffn), "up_proj": (hidden, ffn), "down_proj": (ffn, hidden),
    }  # fmt: skip


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


@dataclass(frozen=True, slots=True)
class SlabLayout:
    """One slab: for every targeted projection, row i of A (`in` elems), then row i of Bᵀ (`out` elems).

    a_offset, b_offset: elements from the slab's start to the row, per module id; -1 where the module is not targeted.
    Rows start on 16-byte boundaries.
    """

    a_offset: tuple[int, ...]
    b_offset: tuple[int, ...]
    slab_elems: int

    @classmethod
    def build(cls, dims: ModuleDims, targets: Sequence[str], itemsize: int) -> SlabLayout:
        """Lay out `targets` (module names) in module order."""
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
        return cls(tuple(a_offset), tuple(b_offset), offset)
