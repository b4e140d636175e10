"""The launches of adapters on kv_b_proj of latent attention in decode steps on a GPU.

Tests: tests/core/executors/test_cuda_families_interpreted.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ....ops.attention.latents_schedule import supports_heads
from ....ops.lora.sgmv import Segments
from ....ops.lora.sgmv_tables import SgmvTables
from ....ops.lora.sgmv_tiles import MERGED_TERMS
from ..specs.attention import LatentSpec

if TYPE_CHECKING:
    from ....ops.attention.latents_triton import LatentLora, LaunchedLora


class LatentLaunches:
    """Makes those of a step; every layer has the same projection."""

    def __init__(self, spec: LatentSpec, module: int, width: int, arena: torch.Tensor, tables: SgmvTables) -> None:
        """module, width: the projection's id and outputs. arena: `[num_pages, page_elems]`."""
        self._spec, self._module, self._width, self._arena, self._tables = spec, module, width, arena, tables
        self._heads = width // (spec.key_dim + spec.value_dim)
        self._made: dict[int, LatentLora] = {}  # by records of a tile

    @staticmethod
    def can_launch(spec: LatentSpec, itemsize: int) -> bool:
        """True if kernels take heads of this width."""
        return supports_heads(spec.key_dim, spec.value_dim, itemsize)

    def use_arena(self, arena: torch.Tensor) -> None:
        """From now on, read adapters from another arena of the same layout."""
        self._arena = arena
        self._made.clear()

    def of(self, layer: int, tiles: torch.Tensor, num_tiles: int, terms: int, segments: Segments) -> LaunchedLora:
        """A layer's. tiles, num_tiles: of one token each, with `terms` records. segments: of the present step."""
        from ....ops.attention.latents_triton import LaunchedLora  # needs triton

        place = self._arena, segments, layer, self._module, self._width
        return LaunchedLora(self._add(terms), tiles, num_tiles, *place)

    def warm_up(self, layer: int, *, compile_only: bool) -> None:
        """Launch each once without work, or compile it. layer: one with the projection."""
        dims = self._spec.key_dim, self._spec.kv_rank, self._spec.value_dim
        where = {"dtype": self._arena.dtype, "device": self._arena.device}
        queries, kept, values = (torch.zeros(1, self._heads, size, **where) for size in dims)
        for terms in (1, MERGED_TERMS):
            add, place = self._add(terms), (layer, self._tables.tiles, 1)
            add(kept, queries, *place, absorbs=True, compile_only=compile_only)
            add(values, kept, *place, absorbs=False, compile_only=compile_only)

    def _add(self, terms: int) -> LatentLora:
        if (found := self._made.get(terms)) is None:
            from ....ops.attention.latents_triton import LatentLora  # needs triton

            its = self._spec
            dims = {"heads": self._heads, "key": its.key_dim, "value": its.value_dim, "kv_rank": its.kv_rank}
            found = self._made[terms] = LatentLora(self._arena, self._tables, self._module, **dims, terms=terms)
        return found
