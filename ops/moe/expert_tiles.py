"""Products of rows with the experts that they go to, on a GPU: tables of tiles that are made there.

Their sizes depend on shapes alone, so that they can be captured; the host never learns where rows go.

Tests: tests/ops/moe/test_expert_tiles_interpreted.py
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..gemm.narrow_weights import NarrowWeight
from .expert_tiles_schedule import TILE_ROWS, num_tiles


@dataclass(frozen=True, slots=True)
class Stack:
    """The matrices of all experts of a layer, on a GPU."""

    data: torch.Tensor | NarrowWeight
    """`[experts, outputs, inputs]`, contiguous."""

    bias: torch.Tensor | None = None
    """`[experts, outputs]`."""


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Up to `block_t` rows of an expert each. A pair p of a step is the expert `p % per_token` of row
    `p // per_token`.
    """

    block_t: int

    pairs: torch.Tensor
    """`[rows · per_token]` int32: all pairs, by expert, and an expert's in the order of rows."""

    expert: torch.Tensor
    """`[tiles]` int32; likewise `first` and `end`."""

    first: torch.Tensor
    """Place in `pairs` where a tile begins, and `end`: where it ends; the same for a tile that is not needed."""

    end: torch.Tensor

    of_pairs: bool = field(default=False, kw_only=True)
    """Each pair is a tile of its own, in order. All tables are then `[tiles]` int64, the expert of each pair."""

    @classmethod
    def unsorted(cls, chosen: torch.Tensor) -> ExpertTiles:
        """Tiles of a pair each, which no launch needs to make. chosen: see `of`; contiguous."""
        each = chosen.flatten()
        return cls(TILE_ROWS[0], each, each, each, each, of_pairs=True)

    @classmethod
    def of(cls, chosen: torch.Tensor, experts: int, block_t: int, used: int | None = None) -> ExpertTiles:
        """Tiles of any number of experts, by torch; `routing_triton.tiles_of` makes those of base products.

        chosen: `[rows, per_token]` int64, the experts of each row. used: the most experts that rows go to, by default
        all.
        """
        flat = chosen.flatten()
        pairs = flat.argsort(stable=True)
        all_experts = torch.arange(experts, device=flat.device)
        ends = torch.searchsorted(flat[pairs], all_experts, right=True)
        begins = torch.cat((ends.new_zeros(1), ends[:-1]))
        tiles = (ends - begins + block_t - 1) // block_t
        last = tiles.cumsum(0)
        index = torch.arange(num_tiles(len(flat), used or experts, block_t), device=flat.device)
        expert = torch.searchsorted(last, index, right=True).clamp_(max=experts - 1)
        first = begins[expert] + (index - (last - tiles)[expert]) * block_t
        end = torch.minimum(first + block_t, ends[expert])
        return cls(block_t, *(each.to(torch.int32) for each in (pairs, expert, torch.minimum(first, end), end)))
