"""SGMV on a GPU (Punica §4): two Triton launches, shrink and expand, over adapters stored in pages.

    h[t]     = x[t] @ Aᵀ                shrink, split over the inputs
    y[t]    += scale · (h[t] @ Bᵀ)      expand, split over the outputs       for every token t of a segment

Projections that share x share one pair of launches. The kernels find rank-rows through the page table and never copy
them; a row may continue in another page. Loads are masked to an adapter's own rank, so no padding is read. The grid
depends on the bucket alone; a program without work returns after its first loads.

Shrink stores the partial sums of a split product separately and expand adds them. Unlike atomic additions, that needs
no zeroed buffer and gives the same bits in every run, eager or replayed, for a few more bytes of `h` from the L2 cache.

Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as cuda

from .. import dependent_launch
from ..launch_triton import KernelLauncher
from .sgmv_schedule import MAX_TARGETS, ExpandShape, Schedule, SgmvShape, expand_constants, shrink_constants
from .sgmv_tables import (
    BEGIN,
    END,
    MORE,
    PLACE_ROWS,
    RANK,
    SCALE,
    SLAB,
    TABLE_ROW,
    TILE_WIDTH,
    SgmvTables,
)

_BEGIN, _END, _TABLE_ROW = (tl.constexpr(at) for at in (BEGIN, END, TABLE_ROW))
_RANK, _SLAB, _SCALE, _MORE, _TILE = (tl.constexpr(at) for at in (RANK, SLAB, SCALE, MORE, TILE_WIDTH))
_ROWS = tl.constexpr(PLACE_ROWS)


class Adapters(NamedTuple):
    """What kernels read of adapters, as one argument: tensors on the host, pointers in a kernel.

    h: the partial sums of shrink, float32 [splits, tokens, modules, terms, blocks · PLACE_ROWS]. arena: [num_pages,
    page]. tiles: of a step. The others are those of `SgmvTables`, int32, and first_elem int64.
    """

    h: torch.Tensor
    arena: torch.Tensor
    tiles: torch.Tensor
    offsets: torch.Tensor
    places: torch.Tensor
    first_elem: torch.Tensor
    pages: torch.Tensor


@triton.jit
def _pick(index, VALUES: tl.constexpr, COUNT: tl.constexpr):
    """Return item `index` of the first COUNT of four constants."""
    last = VALUES[2]
    if COUNT > 3:
        last = tl.where(index == 2, VALUES[2], VALUES[3])
    return tl.where(index == 0, VALUES[0], tl.where(index == 1, VALUES[1], last))


# Triton 3.6 does not pass an attribute of a constant as a constant, so each is first named with an annotation.


@triton.jit
def _module_of(group, C: tl.constexpr):
    """The module's index in tables of offsets."""
    IDS: tl.constexpr = C.modules.ids
    return _pick(group, IDS, C.modules.count)


@triton.jit
def _width_of(group, C: tl.constexpr):
    """The module's outputs."""
    WIDTHS: tl.constexpr = C.modules.widths
    return _pick(group, WIDTHS, C.modules.count)


@triton.jit
def _block_of(group, C: tl.constexpr):
    """The module's first block of columns in the grid."""
    BLOCKS: tl.constexpr = C.modules.blocks
    return _pick(group, BLOCKS, C.modules.count)


@triton.jit
def _column_of(group, C: tl.constexpr):
    """The module's first column of y."""
    COLUMNS: tl.constexpr = C.modules.columns
    return _pick(group, COLUMNS, C.modules.count)


@triton.jit
def _find_module(block, C: tl.constexpr):
    """Return the index of the module, of up to four, that has a block of columns."""
    index = (block >= C.modules.blocks[1]).to(tl.int32) + (block >= C.modules.blocks[2]).to(tl.int32)
    if C.modules.count > 3:
        index += (block >= C.modules.blocks[3]).to(tl.int32)
    return index


@triton.jit
def _find_rows(pages, start, live, width, PAGE: tl.constexpr):
    """Locate rows of `width` columns that begin at elements `start` of an adapter and touch at most two pages.

    Column c is at `first + c` in the arena if c is below `left`, else at `second + c`.
    """
    index = start // PAGE
    room = (index + 1) * PAGE - start
    first = tl.load(pages + index, mask=live, other=0).to(tl.int64) * PAGE + (start - index * PAGE)
    second = tl.load(pages + index + 1, mask=live & (room < width), other=0).to(tl.int64) * PAGE - room
    return first, second, room.to(tl.int32)


@triton.jit
def _load_rows(arena, pages, start, first, second, left, column, live, width, ROW: tl.constexpr, C: tl.constexpr):
    """Load columns `column` of rank-rows `[rows, columns]`; 0 if not live or beyond `width`. ROW: the longest row."""
    PAGE: tl.constexpr = C.records.page
    VEC: tl.constexpr = C.records.vec
    mask = live[:, None] & (column < width)[None, :]
    if ROW <= PAGE:
        at = tl.where(column[None, :] < left[:, None], first[:, None], second[:, None]) + column[None, :]
        at = tl.max_contiguous(tl.multiple_of(at, (1, VEC)), (1, VEC))
    else:
        elem = start[:, None] + column[None, :]
        at = tl.load(pages + elem // PAGE, mask=mask, other=0).to(tl.int64) * PAGE + elem % PAGE
    return tl.load(arena + at, mask=mask, other=0.0)


@triton.jit
def _find_block(adapters, table_row, layer, layers, offset, slab, row, rows, C: tl.constexpr):
    """Locate an adapter's rank-rows `rows`, from `row` on, of one layer and of the module at `offset`.

    Return whether the adapter has any, where they begin, and pages. With records, the beginnings are elements counted
    from the first page of the rows' record, and the pages are the record's, loaded independently of each other.
    Without records, the beginnings are elements counted from the adapter's beginning, and there are no pages.
    """
    PAGES: tl.constexpr = C.records.pages
    near = ()
    if PAGES:
        record = (table_row * layers + layer) * C.records.blocks + row // _ROWS
        place = adapters.places + record * (PAGES + 1)
        base = tl.load(place)
        for i in tl.static_range(PAGES):
            near = near + (tl.load(place + 1 + i),)  # noqa: RUF005, Triton's tuples are not unpacked
        start = base + offset + (rows - row // _ROWS * _ROWS) * slab
    else:
        base = tl.load(adapters.first_elem + table_row * layers + layer)
        start = base + offset + rows.to(tl.int64) * slab
    return (offset >= 0) & (base >= 0), start, near


@triton.jit
def _find_columns(pages, near, start, column, live, width, C: tl.constexpr):
    """Return the arena elements of columns `column` of the rank-rows that `_find_block` found, `[…rows, columns]`, and
    a mask of the elements that are live and within `width`.

    Without records, `pages` are the adapter's, and one more load finds the page.
    """
    PAGES: tl.constexpr = C.records.pages
    PAGE: tl.constexpr = C.records.page
    VEC: tl.constexpr = C.records.vec
    mask = tl.expand_dims(live, -1) & (column < width)
    elem = tl.expand_dims(start, -1) + column
    index = elem // PAGE
    if PAGES:
        page = tl.zeros_like(index) + near[0]
        for i in tl.static_range(1, PAGES):
            page = tl.where(index >= i, near[i], page)
    else:
        page = tl.load(pages + index, mask=mask, other=0)
    at = page.to(tl.int64) * PAGE + (elem - index * PAGE)
    if len(at.shape) == 2:
        at = tl.max_contiguous(tl.multiple_of(at, (1, VEC)), (1, VEC))
    else:
        at = tl.max_contiguous(tl.multiple_of(at, (1, 1, VEC)), (1, 1, VEC))
    return at, mask


@triton.jit
def _load_block(arena, pages, near, start, column, live, width, C: tl.constexpr):
    """Load columns `column` of rank-rows, see `_find_columns`; zero where there are none."""
    at, mask = _find_columns(pages, near, start, column, live, width, C)
    return tl.load(arena + at, mask=mask, other=0.0)


@triton.jit
def _read_record(tiles, TERMS: tl.constexpr):
    """Return a record's table row, rank, slab_elems and scale. Where tiles have several records, one without an adapter
    has rank 0, and any table row.
    """
    table_row, rank, slab = tl.load(tiles + _TABLE_ROW), tl.load(tiles + _RANK), tl.load(tiles + _SLAB)
    if TERMS > 1:
        table_row = tl.maximum(table_row, 0)
    return table_row, rank, slab, tl.load(tiles + _SCALE).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["layer", "layers", "max_pages", "tokens"])
def shrink_decode(x, adapters, layer, layers, max_pages, tokens, x_stride, C: tl.constexpr):
    """h[split, t, m, term, i] = Σ_k x[t, k] · A_m[i, k], where k runs over the split's share of the inputs; a tile is
    one token.

    Grid (tiles, modules · lanes, splits). x: [tokens, d_in], rows x_stride apart. adapters: see `Adapters`; h is
    written. layers, max_pages: lengths of rows of first_elem and pages. C: `ShrinkConstants`.

    Each warp has its own rank-rows, [block_r / warps, warps], and loads x for itself, so no warp waits for another. All
    terms' are loaded at once. With pdl the first weight loads are issued before the previous launch has ended.
    """
    PDL: tl.constexpr = C.pdl
    WARPS: tl.constexpr = C.warps
    CHUNKS: tl.constexpr = C.chunks
    BLOCK_R: tl.constexpr = C.block_r
    BLOCK_K: tl.constexpr = C.block_k
    D_IN: tl.constexpr = C.d_in
    MODULES: tl.constexpr = C.modules.count
    TERMS: tl.constexpr = C.terms
    if PDL:
        cuda.gdc_launch_dependents()
    tile, split = tl.program_id(0), tl.program_id(2)
    group, lane = tl.program_id(1) % MODULES, tl.program_id(1) // MODULES
    tiles = adapters.tiles + tile * (TERMS * _TILE)
    records = ()
    for term in tl.static_range(TERMS):
        records = records + (_read_record(tiles + term * _TILE, TERMS),)  # noqa: RUF005, Triton's tuples are not unpacked
    token = tl.load(tiles + _BEGIN).to(tl.int64)
    most = records[0][1]
    for term in tl.static_range(1, TERMS):
        most = tl.maximum(most, records[term][1])
    is_idle = records[0][0] < 0 if TERMS == 1 else most == 0
    if is_idle:
        if PDL:
            cuda.gdc_wait()
        return
    offsets = ()
    for term in tl.static_range(TERMS):
        offset = tl.load(adapters.offsets + records[term][0] * (2 * C.records.modules) + _module_of(group, C))
        offsets = offsets + (offset,)  # noqa: RUF005
    warp = tl.arange(0, WARPS)
    each = tl.arange(0, BLOCK_R // WARPS)[:, None] * WARPS + warp[None, :]
    for row in range(lane * BLOCK_R, most, C.lanes * BLOCK_R):
        rows = row + each
        found, ranks = (), ()
        for term in tl.static_range(TERMS):
            its = records[term]
            place = _find_block(adapters, its[0], layer, layers, offsets[term], its[2], row, rows, C)
            own = its[1] if TERMS == 1 else tl.where(place[0], its[1], 0)  # rank-rows that change the module
            found, ranks = found + (place,), ranks + (own,)  # noqa: RUF005
        is_changed = found[0][0]
        for term in tl.static_range(1, TERMS):
            is_changed = is_changed | found[term][0]
        if is_changed:
            totals = ()
            for _term in tl.static_range(TERMS):
                totals = totals + (tl.zeros([BLOCK_R // WARPS, WARPS, BLOCK_K], dtype=tl.float32),)  # noqa: RUF005
            for chunk in tl.static_range(CHUNKS):
                column = (split * CHUNKS + chunk) * BLOCK_K + tl.arange(0, BLOCK_K)
                weights = ()
                for term in tl.static_range(TERMS):
                    _, start, near = found[term]
                    pages = adapters.pages + records[term][0].to(tl.int64) * max_pages
                    a = _load_block(adapters.arena, pages, near, start, column, rows < ranks[term], D_IN, C)
                    weights = weights + (a,)  # noqa: RUF005
                if PDL and chunk == 0:
                    cuda.gdc_wait()
                shared = x + token * x_stride + column[None, :] + 0 * warp[:, None]
                values = tl.load(shared, mask=((column < D_IN)[None, :]) & (warp >= 0)[:, None], other=0.0)
                sums = ()
                for term in tl.static_range(TERMS):
                    product = weights[term].to(tl.float32) * values.to(tl.float32)[None, :, :]
                    sums = sums + (totals[term] + product,)  # noqa: RUF005
                totals = sums
            for term in tl.static_range(TERMS):
                slot = ((split * tokens + token) * MODULES + group) * TERMS + term
                at = slot * (C.records.blocks * _ROWS)
                tl.store(adapters.h + at + rows, tl.sum(totals[term], axis=2), mask=rows < ranks[term])
    if PDL:
        cuda.gdc_wait()


@triton.jit(do_not_specialize=["layer", "layers", "max_pages", "tokens"])
def shrink_prefill(x, adapters, layer, layers, max_pages, tokens, x_stride, C: tl.constexpr):
    """Like shrink_decode, with the same arguments, for block_t tokens of a tile at once on tensor cores.

    Grid (tiles, modules · terms · lanes, splits): a program has one of a tile's records. With pdl it lets expand begin,
    and waits for the previous launch.
    """
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    BLOCK_T: tl.constexpr = C.block_t
    BLOCK_R: tl.constexpr = C.block_r
    BLOCK_K: tl.constexpr = C.block_k
    D_IN: tl.constexpr = C.d_in
    MODULES: tl.constexpr = C.modules.count
    TERMS: tl.constexpr = C.terms
    tile, split = tl.program_id(0), tl.program_id(2)
    group, rest = tl.program_id(1) % MODULES, tl.program_id(1) // MODULES
    term, lane = rest % TERMS, rest // TERMS
    tiles = adapters.tiles + (tile * TERMS + term) * _TILE
    table_row = tl.load(tiles + _TABLE_ROW)
    if table_row < 0:
        return
    offset = tl.load(adapters.offsets + table_row * (2 * C.records.modules) + _module_of(group, C))
    base = tl.load(adapters.first_elem + table_row * layers + layer)
    if (offset < 0) | (base < 0):
        return
    token = tl.load(tiles + _BEGIN) + tl.arange(0, BLOCK_T)
    own = token < tl.load(tiles + _END)
    rank, slab = tl.load(tiles + _RANK), tl.load(tiles + _SLAB)
    pages = adapters.pages + table_row.to(tl.int64) * max_pages
    x_rows = x + token.to(tl.int64)[:, None] * x_stride
    for row in range(lane * BLOCK_R, rank, C.lanes * BLOCK_R):
        rows = row + tl.arange(0, BLOCK_R)
        live = rows < rank
        start = base + offset + rows.to(tl.int64) * slab
        first, second, left = _find_rows(pages, start, live, D_IN, C.records.page)
        total = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
        for chunk in range(C.chunks):
            column = (split * C.chunks + chunk) * BLOCK_K + tl.arange(0, BLOCK_K)
            a = _load_rows(adapters.arena, pages, start, first, second, left, column, live, D_IN, D_IN, C)
            values = tl.load(x_rows + column[None, :], mask=own[:, None] & (column < D_IN)[None, :], other=0.0)
            total = tl.dot(values, tl.trans(a), total, input_precision="ieee")
        slot = ((split * tokens + token).to(tl.int64) * MODULES + group) * TERMS + term
        at = slot * (C.records.blocks * _ROWS)
        tl.store(adapters.h + at[:, None] + rows[None, :], total, mask=own[:, None] & live[None, :])


@triton.jit
def _load_parts(h, token, tokens, group, term, row, C: tl.constexpr):
    """Load the partial sums of a block of rank-rows, `[split_block, block_r]`; values beyond the rank are arbitrary."""
    SPLIT_BLOCK: tl.constexpr = C.split_block
    BLOCK_R: tl.constexpr = C.block_r
    part = tl.arange(0, SPLIT_BLOCK)
    slot = ((part * tokens + token) * C.modules.count + group) * C.terms + term
    places = tl.multiple_of(slot * (C.records.blocks * _ROWS) + row, BLOCK_R)[:, None] + tl.arange(0, BLOCK_R)[None, :]
    return tl.load(h + places, mask=tl.broadcast_to((part < C.splits)[:, None], [SPLIT_BLOCK, BLOCK_R]), other=0.0)


@triton.jit
def _product(parts, b, live):
    """Sum the parts `[parts, rows]` of live rows, times b `[rows, columns]`; one thread has all rows of a column."""
    value = tl.where(live, tl.sum(parts, axis=0), 0.0)
    return tl.sum(value[:, None] * b.to(tl.float32), axis=0)


@triton.jit
def _find_offset(adapters, table_row, group, C: tl.constexpr):
    """Return the offset of a module's B in an adapter's rank-rows."""
    behind = C.records.modules + _module_of(group, C)
    return tl.load(adapters.offsets + table_row * (2 * C.records.modules) + behind)


@triton.jit
def _add_blocks(
    total, first, own, adapters, record, offset, token, tokens, group, term, layer, layers, max_pages, column, width,
    C: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Add the products of a record's rank-rows from `first` on to those of a program's columns. own: its rank, or 0
    where it has no weights.
    """
    BLOCK_R: tl.constexpr = C.block_r
    table_row, slab = record[0], record[2]
    pages = adapters.pages + table_row.to(tl.int64) * max_pages
    for row in tl.range(first, record[1], BLOCK_R, num_stages=STAGES):
        parts = _load_parts(adapters.h, token, tokens, group, term, row, C)
        rows = row + tl.arange(0, BLOCK_R)
        _, start, near = _find_block(adapters, table_row, layer, layers, offset, slab, row, rows, C)
        b = _load_block(adapters.arena, pages, near, start, column, rows < own, width, C)
        total += _product(parts, b, rows < own)
    return total


@triton.jit(do_not_specialize=["layer", "layers", "max_pages", "tokens"])
def expand_decode(y, adapters, layer, layers, max_pages, tokens, y_stride, C: tl.constexpr):
    """y[t, c_m + n] += Σ_term scale · Σ_i (Σ_split h[split, t, m, term, i]) · B_m[n, i]; a tile is one token.

    Grid (blocks of columns of all modules, tiles). y: [tokens, ≥ Σ widths], rows y_stride apart; the columns of module
    m begin at c_m. adapters: see `Adapters`. layers, max_pages: see shrink_decode. C: `ExpandConstants`.

    The loads of y and h are issued before the weight loads. With pdl, y and h may not be complete at the start, so
    their loads are issued right after the first weight loads. No term of the tile's own records waits for another; the
    terms of tiles that go on with it follow one by one.
    """
    PDL: tl.constexpr = C.pdl
    BLOCK_R: tl.constexpr = C.block_r
    BLOCK_N: tl.constexpr = C.block_n
    TERMS: tl.constexpr = C.terms
    if PDL:
        cuda.gdc_launch_dependents()
    block, tile = tl.program_id(0), tl.program_id(1)
    tiles = adapters.tiles + tile * (TERMS * _TILE)
    records = ()
    for term in tl.static_range(TERMS):
        records = records + (_read_record(tiles + term * _TILE, TERMS),)  # noqa: RUF005, as above
    token = tl.load(tiles + _BEGIN).to(tl.int64)
    more = records[0][0]
    if TERMS > 1:
        more = tl.load(tiles + _MORE)
    if more < 0:
        if PDL:
            cuda.gdc_wait()
        return
    group = _find_module(block, C)
    width = _width_of(group, C)
    column = (block - _block_of(group, C)) * BLOCK_N + tl.arange(0, BLOCK_N)
    target = y + token * y_stride + _column_of(group, C) + column
    rows = tl.arange(0, BLOCK_R)
    offsets = ()
    for term in tl.static_range(TERMS):
        offsets = offsets + (_find_offset(adapters, records[term][0], group, C),)  # noqa: RUF005
    found = ()
    for term in tl.static_range(TERMS):
        its = records[term]
        found = found + (_find_block(adapters, its[0], layer, layers, offsets[term], its[2], 0, rows, C),)  # noqa: RUF005
    parts = ()
    if not PDL:
        before = tl.load(target, mask=column < width, other=0.0).to(tl.float32)
        for term in tl.static_range(TERMS):
            parts = parts + (_load_parts(adapters.h, token, tokens, group, term, 0, C),)  # noqa: RUF005
    weights = ()
    for term in tl.static_range(TERMS):
        pages = adapters.pages + records[term][0].to(tl.int64) * max_pages
        is_changed, start, near = found[term]
        # Without weights the loads are masked instead of skipped: a branch would be one more thing to wait for.
        live = rows < tl.where(is_changed, records[term][1], 0)
        weights = weights + (_load_block(adapters.arena, pages, near, start, column, live, width, C),)  # noqa: RUF005
    if PDL:
        cuda.gdc_wait()
        before = tl.load(target, mask=column < width, other=0.0).to(tl.float32)
        for term in tl.static_range(TERMS):
            parts = parts + (_load_parts(adapters.h, token, tokens, group, term, 0, C),)  # noqa: RUF005
    after = before
    most = 0  # rank-rows of any term
    for term in tl.static_range(TERMS):
        own = tl.where(found[term][0], records[term][1], 0)
        total = _product(parts[term], weights[term], rows < own)
        if C.records.blocks > 1:
            total = _add_blocks(
                total, BLOCK_R, own, adapters, records[term], offsets[term], token, tokens, group, term, layer, layers,
                max_pages, column, width, C, C.stages,
            )  # fmt: skip
        after += records[term][3] * total
        most = tl.maximum(most, own)
    if TERMS > 1:
        for later in range(1, more + 1):
            for term in tl.static_range(TERMS):
                record = _read_record(tiles + (later * TERMS + term) * _TILE, TERMS)
                offset = _find_offset(adapters, record[0], group, C)
                place = _find_block(adapters, record[0], layer, layers, offset, record[2], 0, rows, C)
                own = tl.where(place[0], record[1], 0)
                total = _add_blocks(
                    tl.zeros([BLOCK_N], dtype=tl.float32), 0, own, adapters, record, offset, token, tokens, group, term,
                    layer, layers, max_pages, column, width, C, 1,
                )  # fmt: skip
                after += record[3] * total
                most = tl.maximum(most, own)
    tl.store(target, after.to(y.dtype.element_ty), mask=column < tl.where(most > 0, width, 0))
    if PDL:
        cuda.gdc_wait()


@triton.jit
def _expand_tile(
    y, adapters, tiles, group, term, column, layer, layers, max_pages, tokens, y_stride, C: tl.constexpr
):  # fmt: skip
    """Add a record's products of h with B to the tile's tokens in y."""
    BLOCK_T: tl.constexpr = C.block_t
    BLOCK_R: tl.constexpr = C.block_r
    BLOCK_N: tl.constexpr = C.block_n
    table_row, rank, slab, factor = _read_record(tiles, C.terms)
    offset = _find_offset(adapters, table_row, group, C)
    base = tl.load(adapters.first_elem + table_row * layers + layer)
    width = _width_of(group, C)
    changed = width
    if C.terms > 1:  # in a loop over records a branch would take all registers
        is_changed = (offset >= 0) & (base >= 0)
        rank = tl.where(is_changed, rank, 0)
        changed = tl.where(is_changed, width, 0)
    elif (offset < 0) | (base < 0):
        return
    token = tl.load(tiles + _BEGIN) + tl.arange(0, BLOCK_T)
    own = token < tl.load(tiles + _END)
    pages = adapters.pages + table_row.to(tl.int64) * max_pages
    total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for row in range(0, rank, BLOCK_R):
        rows = row + tl.arange(0, BLOCK_R)
        live = rows < rank
        start = base + offset + rows.to(tl.int64) * slab
        first, second, left = _find_rows(pages, start, live, width, C.records.page)
        b = _load_rows(adapters.arena, pages, start, first, second, left, column, live, width, C.row, C)
        if C.pdl and y.dtype.element_ty != tl.float32:  # once it has asked for rank-rows; further waits take no time
            cuda.gdc_wait()
        value = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
        for split in tl.range(C.splits, num_stages=1):  # unrolled, the parts would take more registers
            slot = ((split * tokens + token).to(tl.int64) * C.modules.count + group) * C.terms + term
            at = slot * (C.records.blocks * _ROWS)
            value += tl.load(adapters.h + at[:, None] + rows[None, :], mask=own[:, None] & live[None, :], other=0.0)
        total = tl.dot(value.to(b.dtype), b, total, input_precision="ieee")
    if C.pdl:  # the loop may have had no rank-rows
        cuda.gdc_wait()
    target = y + token.to(tl.int64)[:, None] * y_stride + _column_of(group, C) + column[None, :]
    mask = own[:, None] & (column < changed)[None, :]
    after = tl.load(target, mask=mask, other=0.0).to(tl.float32) + factor * total
    tl.store(target, after.to(y.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["layer", "layers", "max_pages", "tokens"])
def expand_prefill(y, adapters, layer, layers, max_pages, tokens, y_stride, C: tl.constexpr):
    """Like expand_decode, with the same arguments and grid, for block_t tokens of a tile at once on tensor cores.

    The tensor cores take h in the dtype of B. Terms are added to y one after the other: two sums at once would take all
    registers. With pdl the first rank-rows are asked for before the previous launch has ended, but for float32's, which
    would take twice as many registers until then.
    """
    BLOCK_N: tl.constexpr = C.block_n
    TERMS: tl.constexpr = C.terms
    if C.pdl:
        cuda.gdc_launch_dependents()
        if y.dtype.element_ty == tl.float32:
            cuda.gdc_wait()
    block, tile = tl.program_id(0), tl.program_id(1)
    tiles = adapters.tiles + tile * (TERMS * _TILE)
    more = tl.load(tiles + (_MORE if TERMS > 1 else _TABLE_ROW))
    if more < 0:
        if C.pdl:
            cuda.gdc_wait()
        return
    group = _find_module(block, C)
    column = (block - _block_of(group, C)) * BLOCK_N + tl.arange(0, BLOCK_N)
    if TERMS == 1:
        _expand_tile(y, adapters, tiles, group, 0, column, layer, layers, max_pages, tokens, y_stride, C)
    else:
        for at in range((more + 1) * TERMS):
            its = tiles + at * _TILE
            _expand_tile(y, adapters, its, group, at % TERMS, column, layer, layers, max_pages, tokens, y_stride, C)
            tl.debug_barrier()  # another thread may add the next term to an output
    if C.pdl:  # programs of adapters that don't change the module have not waited
        cuda.gdc_wait()


class Shrunk(NamedTuple):
    """The result of shrink, for a GEMM that also expands (`small_gemm_triton`)."""

    shape: ExpandShape
    adapters: Adapters
    free: tuple[int, ...]
    """Numbers in the order in which `multiply_rows` takes them."""


class Sgmv:
    """LoRA terms of the projections that share an input, with one schedule; the counterpart of `sgmv.sgmv`.

    A token may have several terms on a module: a merged adapter's, which is subtracted, and its own. One program of
    expand adds all of them.
    """

    def __init__(
        self,
        arena: torch.Tensor,
        tables: SgmvTables,
        modules: Sequence[tuple[int, int, int]],
        d_in: int,
        schedule: Schedule,
        terms: int = 1,
    ) -> None:
        """arena: `[num_pages, page_elems]`. modules: at most four of (module id, first column in y, width), adjacent
        in y. d_in: width of their input. terms: records of a tile, see `SgmvTables`.
        """
        self._tables = tables
        self.use_arena(arena)
        shape = SgmvShape(
            schedule=schedule,
            modules=tuple(modules),
            d_in=d_in,
            page_elems=arena.shape[1],
            itemsize=arena.element_size(),
            max_rank=tables.max_rank,
            pages=tables.place_pages,
            table=tables.modules,
        )
        self._launch = launch = _launch(shape, terms, dependent_launch.begins_early(arena.device))
        self._shape = ExpandShape.build(shape)
        self._layers, self._max_pages = tables.first_elem.shape[1], tables.pages.shape[1]
        per_token = tables.scratch_elems(launch.splits, 1, len(modules), tables.max_rank, terms)
        self._max_tokens = tables.h.numel() // per_token

    def use_arena(self, arena: torch.Tensor) -> None:
        """From now on, read rank-rows from another arena of the same layout."""
        if arena.shape[1] != self._tables.page_elems:
            raise ValueError(f"the arena's pages have {arena.shape[1]} elements, not {self._tables.page_elems}")
        if not arena.is_contiguous():
            raise ValueError("the arena must be contiguous")
        self._arena = arena
        self._adapters: Adapters | None = None

    def __call__(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        layer: int,
        tiles: torch.Tensor,
        num_tiles: int,
        tokens: int | None = None,
        *,
        compile_only: bool = False,
    ) -> None:
        """Add the LoRA terms of planned tiles to y, in place.

        y: `[tokens, out]`, the packed outputs. x: `[tokens, in]`. tiles: `tables.tiles`; or the records of the tiles
        after some first ones, which count tokens from the first token of x. num_tiles: the bucket's number of tiles, at
        least the number that `tables.plan` returned for the schedule's `tile_tokens`. tokens: how many tokens of x the
        tiles may name; by default all. compile_only: compile the kernels, in parallel within
        `launch_triton.compiling`, and launch nothing.
        """
        if tokens is None:
            tokens = len(x)
        if not tokens or not num_tiles:
            return
        if y.stride(1) != 1:
            raise ValueError("rows of y must be contiguous")
        expand, free = self._launch.expand, self._numbers(layer, tokens)
        adapters = self._read(tiles)
        self._shrink(x, adapters, num_tiles, free, compile_only=compile_only)
        expanded, strides = (y, adapters), (y.stride(0),)
        if compile_only:
            expand.compile(expanded, free, strides)
        else:
            expand((self._launch.blocks, num_tiles, 1), expanded, free, strides)

    def shrink(
        self, x: torch.Tensor, layer: int, tiles: torch.Tensor, num_tiles: int, *, compile_only: bool = False
    ) -> Shrunk:
        """Multiply x with A only, for a GEMM that adds the rest in its own launch (`small_gemm_triton.multiply`).

        The arguments are those of `__call__`, for tiles with one token and one record each.
        """
        free = self._numbers(layer, len(x))
        adapters = self._read(tiles)
        self._shrink(x, adapters, num_tiles, free, compile_only=compile_only)
        return Shrunk(self._shape, adapters, (*free[:-1], num_tiles))

    def _numbers(self, layer: int, tokens: int) -> tuple[int, int, int, int]:
        if tokens > self._max_tokens:
            raise ValueError(f"{tokens} tokens in {self._launch.splits} splits need more partial sums than h can hold")
        return layer, self._layers, self._max_pages, tokens

    def _read(self, tiles: torch.Tensor) -> Adapters:
        """What the launches of these tiles read; layers of a step have the same tiles."""
        if self._adapters is None or self._adapters.tiles is not tiles:
            its = self._tables
            self._adapters = Adapters(
                h=its.h,
                arena=self._arena,
                tiles=tiles,
                offsets=its.offsets,
                places=its.places,
                first_elem=its.first_elem,
                pages=its.pages,
            )
        return self._adapters

    def _shrink(
        self, x: torch.Tensor, adapters: Adapters, num_tiles: int, free: tuple[int, ...], *, compile_only: bool
    ) -> None:
        if x.stride(1) != 1:
            raise ValueError("rows of x must be contiguous")
        launch, strides = self._launch, (x.stride(0),)
        shrunk = x, adapters
        if compile_only:
            launch.shrink.compile(shrunk, free, strides)
        else:
            launch.shrink((num_tiles, launch.groups, launch.splits), shrunk, free, strides)


class _Launch(NamedTuple):
    """Launchers of a schedule for a group of projections, with their grids."""

    splits: int
    groups: int
    blocks: int
    shrink: KernelLauncher
    expand: KernelLauncher


@cache
def _launch(shape: SgmvShape, terms: int, pdl: bool) -> _Launch:
    schedule, modules = shape.schedule, shape.modules
    columns = [sum(width for _, _, width in modules[:index]) for index in range(len(modules))]
    if len(modules) > MAX_TARGETS or columns != [column for _, column, _ in modules]:
        raise ValueError("modules must be at most four projections with adjacent outputs")
    if shape.page_elems * shape.itemsize % 16:
        raise ValueError("the size of a page must be a multiple of 16 bytes")
    early = dependent_launch.options(pdl)
    shrink_c, expand_c = (replace(make(shape, terms), pdl=pdl) for make in (shrink_constants, expand_constants))
    shrink = shrink_prefill if schedule.tensor_cores else shrink_decode
    expand = expand_prefill if schedule.tensor_cores else expand_decode
    return _Launch(
        splits=schedule.splits(shape.d_in),
        groups=len(modules) * schedule.lanes * (terms if schedule.tensor_cores else 1),
        blocks=sum(-(-width // schedule.block_n) for _, _, width in modules),
        shrink=KernelLauncher(shrink, {"C": shrink_c, **schedule.options(expand=False), **early}),
        expand=KernelLauncher(expand, {"C": expand_c, **schedule.options(expand=True), **early}),
    )


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
