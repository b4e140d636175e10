"""The LoRA work of a decode step on synthetic adapters in pages, with a model's true shapes.

Tests: tests/perf/bench/models/test_sizes.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ...memory.pages.adapter_layout import AdapterLayout, uniform_parts
from ...ops.lora.sgmv import AdapterRows, Segments
from ...ops.lora.sgmv import sgmv as sgmv_torch
from ...ops.lora.sgmv_schedule import Schedule
from ...ops.lora.sgmv_tables import SgmvTables, TableSizes
from ..kernels.cost import Cost, expand_cost, shrink_cost
from .models.sizes import ModelSize

#: Scale of the weights; B's is the same as A's.
_SCALE = 0.02


@dataclass(frozen=True)
class Group:
    """Projections that share an input: (module id, first column, width) of each, and the step's x and y."""

    name: str
    d_in: int
    modules: tuple[tuple[int, int, int], ...]
    x: torch.Tensor
    y: torch.Tensor


class ArenaPages:
    """Pages of random numbers that hold all cases' adapters, assigned in random order."""

    def __init__(self, size: ModelSize, dtype: torch.dtype, device: str, num_pages: int, seed: int) -> None:
        self.layout = size.geometry.page_layout(dtype.itemsize)
        self.dtype, self.device, self.seed = dtype, device, seed
        generator = torch.Generator(device).manual_seed(seed)
        self.pages = torch.empty(num_pages, self.layout.page_elems, dtype=dtype, device=device)
        self.pages.normal_(0, _SCALE, generator=generator)
        self._order = torch.randperm(num_pages, generator=torch.Generator().manual_seed(seed)).tolist()

    def take(self, counts: Sequence[int]) -> list[list[int]]:
        """Lists of distinct pages, one for each count; the same on every call."""
        if sum(counts) > len(self._order):
            raise ValueError(f"the case needs {sum(counts)} pages, the arena has {len(self._order)}")
        pages = iter(self._order)
        return [[next(pages) for _ in range(count)] for count in counts]


class LoraCase:
    """Segments of `lengths` tokens, adapter i of rank `ranks[i]` on all projections, in `layers` layers.

    Timed work goes through all layers, so all other layers' bytes are read between two uses of one layer; with enough
    of them no cache holds the bytes.
    """

    def __init__(
        self,
        size: ModelSize,
        arena: ArenaPages,
        lengths: Sequence[int],
        ranks: Sequence[int],
        layers: int,
        schedule: Schedule,
        max_rank: int,
    ) -> None:
        self.layers, self.schedule, self.ranks, self.lengths = layers, schedule, tuple(ranks), tuple(lengths)
        self._arena = arena
        self.tokens = sum(lengths)
        rows = _adapters(size, arena, ranks, layers)
        self.segments, begin = Segments(), 0
        for length, adapter in zip(lengths, rows, strict=True):
            self.segments.add(begin, begin + length, adapter)
            begin += length
        generator = torch.Generator(arena.device).manual_seed(arena.seed)
        self.groups = [
            self._group(name, d_in, modules, generator) for name, (d_in, modules) in size.geometry.groups.items()
        ]
        # a bucket's grid must work for any split of its tokens, so it is that of an adapter per token
        self.num_tiles = schedule.max_tiles(self.tokens, self.tokens if not schedule.tensor_cores else len(lengths))
        sizes = TableSizes(
            table_rows=len(rows),
            layers=layers,
            max_pages=max(len(adapter.pages) for adapter in rows),
            max_rank=max_rank,
            page_elems=arena.layout.page_elems,
            slab_elems=max(adapter.slab_elems for adapter in rows),
            modules=len(rows[0].a_offset),
            max_tiles=self.num_tiles,
            scratch=max(
                SgmvTables.scratch_elems(schedule.splits(group.d_in), self.tokens, len(group.modules), max_rank)
                for group in self.groups
            ),
        )
        self.tables = SgmvTables(sizes, arena.device)
        self.tables.plan(self.segments, schedule.tile_tokens)

    def launch(self, layer: int, group: Group) -> None:
        from ...ops.lora.sgmv_triton import Sgmv

        product = Sgmv(self._arena.pages, self.tables, group.modules, group.d_in, self.schedule)
        product(group.y, group.x, layer, self.tables.tiles, self.num_tiles)

    def run(self, groups: Sequence[Group] | None = None) -> None:
        """Every layer's launches, for all groups or for some."""
        for layer in range(self.layers):
            for group in groups or self.groups:
                self.launch(layer, group)

    def cost(self, groups: Sequence[Group] | None = None) -> Cost:
        """Bytes and FLOPs of one layer."""
        found, itemsize = Cost(0, 0), self._arena.dtype.itemsize
        for group in groups or self.groups:
            splits = self.schedule.splits(group.d_in)
            found += shrink_cost(
                self.segments, 0, modules=group.modules, d_in=group.d_in, splits=splits, itemsize=itemsize
            )
            found += expand_cost(self.segments, 0, group.modules, splits, itemsize)
        return found

    def error(self) -> float:
        """Largest difference from torch's results in layer 0, relative to the largest of them."""
        worst = 0.0
        for group in self.groups:
            want = torch.zeros_like(group.y)
            group.y.zero_()
            self.launch(0, group)
            sgmv_torch(want, group.x, self._arena.pages, self.segments, layer=0, modules=group.modules)
            scale = float(want.float().abs().max())
            worst = max(worst, float((group.y.float() - want.float()).abs().max()) / scale)
            group.y.zero_()
        return worst

    def _group(
        self, name: str, d_in: int, modules: tuple[tuple[int, int, int], ...], generator: torch.Generator
    ) -> Group:
        options = {"dtype": self._arena.dtype, "device": self._arena.device}
        x = torch.empty(self.tokens, d_in, **options).normal_(generator=generator)
        return Group(name, d_in, modules, x, torch.zeros(self.tokens, sum(m[2] for m in modules), **options))


def layers_for(bytes_per_layer: int, cache_bytes: int, most: int = 256) -> int:
    """Number of layers, at most `most`, with four times the cache's bytes: a pass over all of them reads from
    memory.
    """
    return min(most, max(1, -(-4 * cache_bytes // bytes_per_layer)))


def num_pages(size: ModelSize, ranks: Sequence[int], layers: int, itemsize: int) -> int:
    """Number of pages of adapters of these ranks, each with its own."""
    page_bytes = size.geometry.page_layout(itemsize).page_bytes
    return sum(-(-layer_bytes(size, [rank], itemsize) * layers // page_bytes) for rank in ranks)


def layer_bytes(size: ModelSize, ranks: Sequence[int], itemsize: int) -> int:
    """Bytes of all adapters' slabs in one layer."""
    return sum(ranks) * size.geometry.rank_params // size.geometry.layers * itemsize


def _adapters(size: ModelSize, arena: ArenaPages, ranks: Sequence[int], layers: int) -> list[AdapterRows]:
    layouts, projections = {}, replace(size.geometry, layers=layers).projections
    for rank in set(ranks):
        parts = uniform_parts(projections, rank)
        layouts[rank] = AdapterLayout.build(parts, projections, arena.layout.page_elems, arena.dtype.itemsize)
    taken = arena.take([layouts[rank].num_pages for rank in ranks])
    rows = []
    for rank, pages in zip(ranks, taken, strict=True):
        (place,) = layouts[rank].parts
        slabs = place.slabs
        rows.append(
            AdapterRows(
                pages,
                rank,
                scale=1.0,
                slab_elems=slabs.slab_elems,
                a_offset=slabs.a_offset,
                b_offset=slabs.b_offset,
                first_elem=place.first_elem,
            )
        )
    return rows
