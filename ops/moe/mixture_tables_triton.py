"""Tiles of SGMV over pairs of an adapter and an expert, which a GPU writes in one Triton launch before a product.

Import this module lazily: it needs triton. Tests: tests/core/model/moe/test_mixture_launches_interpreted.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..launch_triton import KernelLauncher
from ..lora.sgmv_tables import BEGIN, END, PLACE_ROWS, RANK, SCALE, SLAB, TABLE_ROW, TILE_WIDTH
from .expert_tiles import ExpertTiles
from .mixture_tables import MAX_PARTS, PART_OFFSETS, MixtureTables, TileWriter

_BEGIN, _END, _TABLE_ROW = (tl.constexpr(at) for at in (BEGIN, END, TABLE_ROW))
_RANK, _SLAB, _SCALE, _TILE = (tl.constexpr(at) for at in (RANK, SLAB, SCALE, TILE_WIDTH))
_PARTS, _PART_OFFSETS, _ROWS = (tl.constexpr(at) for at in (MAX_PARTS, PART_OFFSETS, PLACE_ROWS))


class Written(NamedTuple):
    """Tables of `SgmvTables` that have a row for each tile: int32, and first_elem int64."""

    tiles: torch.Tensor
    offsets: torch.Tensor
    places: torch.Tensor
    first_elem: torch.Tensor
    pages: torch.Tensor


class Known(NamedTuple):
    """Tables of `MixtureTables`."""

    adapter_of: torch.Tensor
    places_of: torch.Tensor
    parts: torch.Tensor
    pages_of: torch.Tensor


class Runs(NamedTuple):
    """Pairs that tiles are made of. chosen: int64, the expert of each pair. group, first, end: int32, of runs."""

    chosen: torch.Tensor
    group: torch.Tensor
    first: torch.Tensor
    end: torch.Tensor


@triton.jit(do_not_specialize=["layer", "layers", "max_pages", "num_tiles", "first_pair"])
def write_tiles(out, known, runs, layer, layers, max_pages, num_tiles, first_pair, C: tl.constexpr):
    """Write tile `t` of a group's projection at table row `slot · num_tiles + t`: its pairs, and where the rank-rows of
    their adapter and expert are.

    Grid (num_tiles, slots), a slot for each projection. out: see `Written`; known: `Known`; runs: `Runs`. layers,
    max_pages: of `MixtureTables`. first_pair: of the first tile, where tiles are of one pair. C: `TileWriter`.
    """
    ADAPTERS: tl.constexpr = C.adapters
    EXPERTS: tl.constexpr = C.experts
    PER_TOKEN: tl.constexpr = C.per_token
    PAGE: tl.constexpr = C.page
    WINDOW: tl.constexpr = C.window
    WINDOW_BLOCK: tl.constexpr = C.window_block
    BLOCKS: tl.constexpr = C.blocks
    RECORD: tl.constexpr = C.record
    RECORD_BLOCK: tl.constexpr = C.record_block
    OFFSETS: tl.constexpr = C.offsets
    tile, slot = tl.program_id(0), tl.program_id(1)
    row = slot * num_tiles + tile
    if ADAPTERS:
        group, first, end = tl.load(runs.group + tile), tl.load(runs.first + tile), tl.load(runs.end + tile)
        adapter = group % ADAPTERS - 1
        expert = group // ADAPTERS
    else:
        first, end = tile, tile + 1
        pair = first_pair + tile
        adapter = tl.load(known.adapter_of + pair // PER_TOKEN)
        expert = tl.zeros_like(adapter)
        if EXPERTS:
            expert = tl.load(runs.chosen + pair).to(tl.int32)
    at = (adapter.to(tl.int64) * layers + layer) * C.places + C.first + slot * C.each + expert
    place = tl.load(known.places_of + at, mask=(adapter >= 0) & (first < end), other=-1)
    tiles = out.tiles + row * _TILE
    tl.store(tiles + _TABLE_ROW, tl.where(place < 0, -1, row))
    if place < 0:
        return
    part = known.parts + (adapter * _PARTS + (place % _PARTS).to(tl.int32)) * (_PART_OFFSETS + OFFSETS)
    rank, slab, scale = tl.load(part), tl.load(part + 1), tl.load(part + 2)
    tl.store(tiles + _BEGIN, first)
    tl.store(tiles + _END, end)
    tl.store(tiles + _RANK, rank)
    tl.store(tiles + _SLAB, slab)
    tl.store(tiles + _SCALE, scale)
    offset = tl.arange(0, C.offsets_block)
    known_offset = tl.load(part + _PART_OFFSETS + offset, mask=offset < OFFSETS, other=-1)
    tl.store(out.offsets + row * OFFSETS + offset, known_offset, mask=offset < OFFSETS)
    elem = place // _PARTS
    page = (elem // PAGE).to(tl.int32)
    begin = (elem % PAGE).to(tl.int32)
    tl.store(out.first_elem + row, begin.to(tl.int64))
    pages = known.pages_of + adapter.to(tl.int64) * max_pages
    window = tl.arange(0, WINDOW_BLOCK)
    near = tl.load(pages + tl.minimum(page + window, max_pages - 1), mask=window < WINDOW, other=0)
    tl.store(out.pages + row.to(tl.int64) * WINDOW + window, near, mask=window < WINDOW)
    if RECORD:
        column = tl.arange(0, RECORD_BLOCK)
        for block in range(BLOCKS):
            start = begin + block * _ROWS * slab
            index = start // PAGE
            record = out.places + (row.to(tl.int64) * BLOCKS + block) * (RECORD + 1)
            after = tl.minimum(page + index + column, max_pages - 1)
            inside = column < RECORD
            found = tl.load(pages + after, mask=inside, other=0)
            tl.store(record, start - index * PAGE)
            tl.store(record + 1 + column, found, mask=inside)


def write(
    tables: MixtureTables,
    group: str,
    layer: int,
    *,
    pairs: int = 0,
    first_pair: int = 0,
    chosen: torch.Tensor | None = None,
    runs: ExpertTiles | None = None,
    compile_only: bool = False,
) -> int:
    """Write the tiles of a group's product in a layer to `tables.tiles`; return their number.

    runs: tiles of runs of pairs, by expert and adapter: of group `expert · num_runs + 1 + row`. None: a tile for each
    of `pairs` pairs from `first_pair` on. chosen: `[rows, per_token]` int64, contiguous: the experts of each row; None
    for projections that every token has.
    """
    its = tables.groups[group]
    per_token = 1 if chosen is None else chosen.shape[1]
    num = pairs if runs is None else len(runs.first)
    slots, out = len(its.modules), tables.tiles
    if slots * num > len(out.offsets):
        raise ValueError(f"{slots * num} tiles of a mixture, the tables hold {len(out.offsets)}")
    idle = out.tiles
    tensors = (
        Written(idle, out.offsets, out.places, out.first_elem, out.pages),
        Known(tables.adapter_of, tables.places, tables.parts, tables.pages),
        Runs(
            tables.places if chosen is None else chosen,
            *((idle, idle, idle) if runs is None else (runs.expert, runs.first, runs.end)),
        ),
    )
    free = layer, tables.places.shape[1], tables.pages.shape[1], num, first_pair
    launcher = _launcher(tables.writer(group, per_token, by_runs=runs is not None))
    if compile_only:
        launcher.compile(tensors, free, ())
    else:
        launcher((num, slots, 1), tensors, free, ())
    return slots * num


@cache
def _launcher(constants: TileWriter) -> KernelLauncher:
    return KernelLauncher(write_tiles, {"C": constants, "num_warps": 1})


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
