"""Adapters on kv_b_proj of latent attention in decode steps on a GPU: a launch for queries, and one for values.

A head's rows of B follow queries to the latents' space, `q[h] · B_h` and then `· A`, or values out of it, `x[h] · Aᵀ`
and then `· B_hᵀ`; see `latents`. Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as cuda

from .. import dependent_launch
from ..launch_triton import KernelLauncher
from ..lora.sgmv import Segments
from ..lora.sgmv_tables import BEGIN, MORE, TABLE_ROW, TILE_WIDTH, SgmvTables
from ..lora.sgmv_triton import Adapters, _find_block, _load_block, _read_record
from .latents import AbsorbedLora, Product
from .latents_schedule import LatentLoraConstants, latent_lora_constants, latent_lora_options

_BEGIN, _MORE, _TABLE_ROW, _TILE = (tl.constexpr(at) for at in (BEGIN, MORE, TABLE_ROW, TILE_WIDTH))


@triton.jit
def _add_record(total, values, adapters, tiles, head, layer, layers, max_pages, C: tl.constexpr):
    """Add the products of a record's rank-rows with one head's values; return the sum, and the rank of those."""
    BLOCK_R: tl.constexpr = C.block_r
    table_row, rank, slab, factor = _read_record(tiles, C.terms)
    offsets = adapters.offsets + table_row * (2 * C.records.modules) + C.module
    offset_a, offset_b = tl.load(offsets), tl.load(offsets + C.records.modules)
    pages = adapters.pages + table_row.to(tl.int64) * max_pages
    of_a, of_b = tl.arange(0, C.block_a), tl.arange(0, C.block_b)
    begin = head * C.width + C.first
    most = 0
    for row in range(0, rank, BLOCK_R):
        rows = row + tl.arange(0, BLOCK_R)
        is_changed, start, near = _find_block(adapters, table_row, layer, layers, offset_a, slab, row, rows, C)
        own = tl.where(is_changed, rank, 0)
        a = _load_block(adapters.arena, pages, near, start, of_a, rows < own, C.kv_rank, C)
        _, start, near = _find_block(adapters, table_row, layer, layers, offset_b, slab, row, rows, C)
        b = _load_block(adapters.arena, pages, near, start, begin + of_b, rows < own, begin + C.elems, C)
        if C.absorbs:
            h = tl.sum(values[None, :] * b.to(tl.float32), axis=1) * factor
            total += tl.sum(h[:, None] * a.to(tl.float32), axis=0)
        else:
            h = tl.sum(values[None, :] * a.to(tl.float32), axis=1) * factor
            total += tl.sum(h[:, None] * b.to(tl.float32), axis=0)
        most = tl.maximum(most, own)
    return total, most


@triton.jit(do_not_specialize=["layer", "layers", "max_pages"])
def add_to_heads(
    y, x, adapters, layer, layers, max_pages, y_stride, y_head_stride, x_stride, x_head_stride, C: tl.constexpr
):
    """y[t, h] += Σ_term scale · (x[t, h] · B_h) · A, with C.absorbs; else Σ_term scale · (x[t, h] · Aᵀ) · B_hᵀ.

    Grid (tiles, heads); a tile is one token. y, x: [tokens, heads, …] with the given strides; of queries and the
    latents' space, or of that and values. adapters: see `sgmv_triton.Adapters`; h is not used. layers, max_pages:
    lengths of rows of first_elem and pages. C: `LatentLoraConstants`.
    """
    INPUTS: tl.constexpr = C.elems if C.absorbs else C.kv_rank
    OUTPUTS: tl.constexpr = C.kv_rank if C.absorbs else C.elems
    BLOCK_IN: tl.constexpr = C.block_b if C.absorbs else C.block_a
    BLOCK_OUT: tl.constexpr = C.block_a if C.absorbs else C.block_b
    TERMS: tl.constexpr = C.terms
    tile, head = tl.program_id(0), tl.program_id(1)
    tiles = adapters.tiles + tile * (TERMS * _TILE)
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    more = tl.load(tiles + (_MORE if TERMS > 1 else _TABLE_ROW))
    if more < 0:
        return
    token = tl.load(tiles + _BEGIN).to(tl.int64)
    column = tl.arange(0, BLOCK_IN)
    source = x + token * x_stride + head * x_head_stride + column
    values = tl.load(source, mask=column < INPUTS, other=0.0).to(tl.float32)
    total = tl.zeros([BLOCK_OUT], dtype=tl.float32)
    if TERMS == 1:
        total, most = _add_record(total, values, adapters, tiles, head, layer, layers, max_pages, C)
    else:
        most = 0
        for at in range((more + 1) * TERMS):
            total, own = _add_record(total, values, adapters, tiles + at * _TILE, head, layer, layers, max_pages, C)
            most = tl.maximum(most, own)
    if most > 0:
        place = tl.arange(0, BLOCK_OUT)
        target = y + token * y_stride + head * y_head_stride + place
        before = tl.load(target, mask=place < OUTPUTS, other=0.0).to(tl.float32)
        tl.store(target, (before + total).to(y.dtype.element_ty), mask=place < OUTPUTS)


class LatentLora:
    """Adapters on kv_b_proj of every layer, for tiles of one token with so many records each."""

    def __init__(
        self, arena: torch.Tensor, tables: SgmvTables, module: int, *, heads: int, key: int, value: int, kv_rank: int,
        terms: int = 1,
    ) -> None:  # fmt: skip
        """arena: `[num_pages, page_elems]`. module: its id. key, value: elements of a head's key and value."""
        self._arena, self._tables, self._heads = arena, tables, heads
        page, itemsize = arena.shape[1], arena.element_size()
        shape = module, key, value, kv_rank, page, itemsize, tables.max_rank, tables.place_pages, tables.modules
        early = dependent_launch.begins_early(arena.device)
        self._launches = {
            absorbs: _launch(replace(latent_lora_constants(*shape, absorbs=absorbs, terms=terms), pdl=early))
            for absorbs in (True, False)
        }
        self._free = tables.first_elem.shape[1], tables.pages.shape[1]

    def __call__(
        self, y: torch.Tensor, x: torch.Tensor, layer: int, tiles: torch.Tensor, num_tiles: int, *, absorbs: bool,
        compile_only: bool = False,
    ) -> None:  # fmt: skip
        """Add to y `[tokens, heads, …]` what adapters make of x, queries if it `absorbs`, else attended latents.

        tiles, num_tiles, compile_only: see `sgmv_triton.Sgmv`.
        """
        if y.stride(2) != 1 or x.stride(2) != 1:
            raise ValueError("elements of a head must be contiguous")
        if not len(x) or not num_tiles:
            return
        its = self._tables
        adapters = Adapters(its.h, self._arena, tiles, its.offsets, its.places, its.first_elem, its.pages)
        launch, free = self._launches[absorbs], (layer, *self._free)
        strides = *y.stride()[:2], *x.stride()[:2]
        if compile_only:
            launch.compile((y, x, adapters), free, strides)
        else:
            launch((num_tiles, self._heads, 1), (y, x, adapters), free, strides)


@cache
def _launch(constants: LatentLoraConstants) -> KernelLauncher:
    options = {
        **latent_lora_options(absorbs=constants.absorbs, terms=constants.terms),
        **dependent_launch.options(constants.pdl),
    }
    return KernelLauncher(add_to_heads, {"C": constants, **options})


class LaunchedLora(AbsorbedLora):
    """`AbsorbedLora` of a decode step, by the kernel: what its launches read is in tables, so they may be captured."""

    __slots__ = ("_add", "_num_tiles", "_tiles")

    def __init__(
        self,
        add: LatentLora,
        tiles: torch.Tensor,
        num_tiles: int,
        arena: torch.Tensor,
        segments: Segments,
        layer: int,
        module: int,
        width: int,
    ) -> None:
        """The last five are those of `AbsorbedLora`."""
        super().__init__(arena, segments, layer, module, width)
        self._add, self._tiles, self._num_tiles = add, tiles, num_tiles

    def absorb(self, q: torch.Tensor, product: Product) -> torch.Tensor:
        found = product(q)
        self._add(found, q, self._layer, self._tiles, self._num_tiles, absorbs=True)
        return found

    def expand(self, x: torch.Tensor, product: Product) -> torch.Tensor:
        found = product(x)
        self._add(found, x, self._layer, self._tiles, self._num_tiles, absorbs=False)
        return found


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportPrivateUsage=false
# pyright: reportAttributeAccessIssue=false, reportAssignmentType=false, reportOperatorIssue=false
