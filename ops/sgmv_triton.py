"""SGMV on a GPU (Punica §4): two Triton launches, shrink and expand, over adapters that lie in pages.

    h[t]     = x[t] @ Aᵀ                shrink, split over the inputs
    y[t]    += scale · (h[t] @ Bᵀ)      expand, split over the outputs       for every token t of a segment

Projections that share x are one pair of launches. Rank-rows are found through the page table and never copied; a row
may go on in another page. Loads are masked to an adapter's own rank, so no padding is read. A grid depends on the
bucket alone; a program without work returns after its first loads.

Parts of a split product are stored side by side and added up by expand. Against atomic additions that spares zeroing
the buffer and gives the same bits on every run, eager or replayed, for a few bytes of `h` from the second-level cache.

Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax: its arguments and loops are not what type checkers take them for.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .sgmv_schedule import Schedule, expand_constants, shrink_constants
from .sgmv_tables import META_A, META_B, META_RANK, META_SLAB, META_WIDTH, SgmvTables

_RANK, _SLAB, _A, _B = (tl.constexpr(at) for at in (META_RANK, META_SLAB, META_A, META_B))
_META = tl.constexpr(META_WIDTH)


@triton.jit
def _pick(index, V0: tl.constexpr, V1: tl.constexpr, V2: tl.constexpr):
    """Item `index` of three constants."""
    return tl.where(index == 0, V0, tl.where(index == 1, V1, V2))


@triton.jit
def _find_rows(pages, start, live, width, PAGE: tl.constexpr, VEC: tl.constexpr):
    """Places of rows of `width` columns that begin at elements `start` of an adapter and touch two pages at most.

    Column c is at `first + c` in the arena while c is below `left`, at `second + c` from there on.
    """
    index = start // PAGE
    room = (index + 1) * PAGE - start
    first = tl.load(pages + index, mask=live, other=0).to(tl.int64) * PAGE + (start - index * PAGE)
    second = tl.load(pages + index + 1, mask=live & (room < width), other=0).to(tl.int64) * PAGE - room
    return tl.multiple_of(first, VEC), tl.multiple_of(second, VEC), tl.multiple_of(room.to(tl.int32), VEC)


@triton.jit
def _load_rows(
    arena, pages, start, first, second, left, column, live, width,
    ROW: tl.constexpr, PAGE: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """Columns `column` of rank-rows, `[rows, columns]`; zero where not live or beyond `width`. ROW: the longest row."""
    mask = live[:, None] & (column < width)[None, :]
    if ROW <= PAGE:
        at = tl.where(column[None, :] < left[:, None], first[:, None], second[:, None]) + column[None, :]
        at = tl.max_contiguous(tl.multiple_of(at, (1, VEC)), (1, VEC))
    else:
        elem = start[:, None] + column[None, :]
        at = tl.load(pages + elem // PAGE, mask=mask, other=0).to(tl.int64) * PAGE + elem % PAGE
    return tl.load(arena + at, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["layer", "layers", "max_pages", "tokens"])
def shrink_decode(
    h, x, arena, tiles, meta, first_elem, pages, layer, layers, max_pages, tokens, x_stride,
    M0: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr, MODULES: tl.constexpr,
    D_IN: tl.constexpr, PAGE: tl.constexpr, VEC: tl.constexpr, MAX_RANK: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """h[split, t, m, i] = Σ_k x[t, k] · A_m[i, k], k in the split's share of the inputs; token by token, no tile.

    Grid (tiles, MODULES · LANES, splits). VEC: elements in 16 bytes.
    h: float32 [splits, tokens, MODULES, MAX_RANK]. x: [tokens, D_IN], rows x_stride apart.
    arena: [num_pages, PAGE]. tiles, meta, first_elem, pages: see SgmvTables. M0 … M2: ids of the modules.
    """
    tile, split = tl.program_id(0), tl.program_id(2)
    group, lane = tl.program_id(1) % MODULES, tl.program_id(1) // MODULES
    slot = tl.load(tiles + 3 * tile + 2)
    if slot < 0:
        return
    offset = tl.load(meta + slot * _META + _A + _pick(group, M0, M1, M2))
    base = tl.load(first_elem + slot * layers + layer)
    if (offset < 0) | (base < 0):
        return
    begin, end = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1).to(tl.int64)
    rank = tl.load(meta + slot * _META + _RANK)
    slab = tl.load(meta + slot * _META + _SLAB)
    pages += slot.to(tl.int64) * max_pages
    for row in range(lane * BLOCK_R, rank, LANES * BLOCK_R):
        rows = row + tl.arange(0, BLOCK_R)
        live = rows < rank
        start = base + offset + rows.to(tl.int64) * slab
        first, second, left = _find_rows(pages, start, live, D_IN, PAGE, VEC)
        for token in range(begin, end):
            total = tl.zeros([BLOCK_R, BLOCK_K], dtype=tl.float32)
            for chunk in tl.static_range(CHUNKS):
                column = (split * CHUNKS + chunk) * BLOCK_K + tl.arange(0, BLOCK_K)
                a = _load_rows(arena, pages, start, first, second, left, column, live, D_IN, D_IN, PAGE, VEC)
                values = tl.load(x + token * x_stride + column, mask=column < D_IN, other=0.0)
                total += a.to(tl.float32) * values.to(tl.float32)[None, :]
            at = ((split * tokens + token) * MODULES + group) * MAX_RANK
            tl.store(h + at + rows, tl.sum(total, axis=1), mask=live)


@triton.jit(do_not_specialize=["layer", "layers", "max_pages", "tokens"])
def shrink_prefill(
    h, x, arena, tiles, meta, first_elem, pages, layer, layers, max_pages, tokens, x_stride,
    M0: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr, MODULES: tl.constexpr,
    D_IN: tl.constexpr, PAGE: tl.constexpr, VEC: tl.constexpr, MAX_RANK: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_K: tl.constexpr, LANES: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Same equation, arguments and grid as shrink_decode; BLOCK_T tokens of a tile at once, on tensor cores."""
    tile, split = tl.program_id(0), tl.program_id(2)
    group, lane = tl.program_id(1) % MODULES, tl.program_id(1) // MODULES
    slot = tl.load(tiles + 3 * tile + 2)
    if slot < 0:
        return
    offset = tl.load(meta + slot * _META + _A + _pick(group, M0, M1, M2))
    base = tl.load(first_elem + slot * layers + layer)
    if (offset < 0) | (base < 0):
        return
    token = tl.load(tiles + 3 * tile) + tl.arange(0, BLOCK_T)
    own = token < tl.load(tiles + 3 * tile + 1)
    rank = tl.load(meta + slot * _META + _RANK)
    slab = tl.load(meta + slot * _META + _SLAB)
    pages += slot.to(tl.int64) * max_pages
    x_rows = x + token.to(tl.int64)[:, None] * x_stride
    for row in range(lane * BLOCK_R, rank, LANES * BLOCK_R):
        rows = row + tl.arange(0, BLOCK_R)
        live = rows < rank
        start = base + offset + rows.to(tl.int64) * slab
        first, second, left = _find_rows(pages, start, live, D_IN, PAGE, VEC)
        total = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
        for chunk in range(CHUNKS):
            column = (split * CHUNKS + chunk) * BLOCK_K + tl.arange(0, BLOCK_K)
            a = _load_rows(arena, pages, start, first, second, left, column, live, D_IN, D_IN, PAGE, VEC)
            values = tl.load(x_rows + column[None, :], mask=own[:, None] & (column < D_IN)[None, :], other=0.0)
            total = tl.dot(values, tl.trans(a), total, input_precision="ieee")
        at = ((split * tokens + token).to(tl.int64) * MODULES + group) * MAX_RANK
        tl.store(h + at[:, None] + rows[None, :], total, mask=own[:, None] & live[None, :])


@triton.jit(do_not_specialize=["layer", "layers", "max_pages", "tokens"])
def expand_decode(
    y, h, arena, tiles, meta, scale, first_elem, pages, layer, layers, max_pages, tokens, y_stride,
    M0: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr, MODULES: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, ROW: tl.constexpr,
    PAGE: tl.constexpr, VEC: tl.constexpr, MAX_RANK: tl.constexpr, SPLITS: tl.constexpr, SPLIT_BLOCK: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """y[t, c_m + n] += scale · Σ_i (Σ_split h[split, t, m, i]) · B_m[n, i]; token by token, no tile.

    Grid (blocks of columns of all modules, tiles). y: [tokens, ≥ W0 + W1 + W2], rows y_stride apart; module m's W_m
    columns begin at c_m = Σ_{j<m} W_j. h: float32 [SPLITS, tokens, MODULES, MAX_RANK]. arena: [num_pages, PAGE].
    tiles, meta, scale, first_elem, pages: see SgmvTables. ROW: the largest W. SPLIT_BLOCK: SPLITS or the next power
    of two.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + 3 * tile + 2)
    if slot < 0:
        return
    BLOCKS_0: tl.constexpr = (W0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (W1 + BLOCK_N - 1) // BLOCK_N
    group = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_1).to(tl.int32)
    offset = tl.load(meta + slot * _META + _B + _pick(group, M0, M1, M2))
    base = tl.load(first_elem + slot * layers + layer)
    if (offset < 0) | (base < 0):
        return
    begin, end = tl.load(tiles + 3 * tile).to(tl.int64), tl.load(tiles + 3 * tile + 1).to(tl.int64)
    rank = tl.load(meta + slot * _META + _RANK)
    slab = tl.load(meta + slot * _META + _SLAB)
    factor = tl.load(scale + slot)
    pages += slot.to(tl.int64) * max_pages
    width = _pick(group, W0, W1, W2)
    column = (block - _pick(group, 0, BLOCKS_0, BLOCKS_1)) * BLOCK_N + tl.arange(0, BLOCK_N)
    parts = tl.arange(0, SPLIT_BLOCK)
    for token in range(begin, end):
        total = tl.zeros([BLOCK_R, BLOCK_N], dtype=tl.float32)
        at = ((parts * tokens + token) * MODULES + group) * MAX_RANK
        for row in range(0, rank, BLOCK_R):
            rows = row + tl.arange(0, BLOCK_R)
            live = rows < rank
            start = base + offset + rows.to(tl.int64) * slab
            first, second, left = _find_rows(pages, start, live, width, PAGE, VEC)
            b = _load_rows(arena, pages, start, first, second, left, column, live, width, ROW, PAGE, VEC)
            mask = (parts < SPLITS)[:, None] & live[None, :]
            value = tl.sum(tl.load(h + at[:, None] + rows[None, :], mask=mask, other=0.0), axis=0)
            total += value[:, None] * b.to(tl.float32)
        target = y + token * y_stride + _pick(group, 0, W0, W0 + W1) + column
        before = tl.load(target, mask=column < width, other=0.0).to(tl.float32)
        after = before + factor * tl.sum(total, axis=0)
        tl.store(target, after.to(y.dtype.element_ty), mask=column < width)


@triton.jit(do_not_specialize=["layer", "layers", "max_pages", "tokens"])
def expand_prefill(
    y, h, arena, tiles, meta, scale, first_elem, pages, layer, layers, max_pages, tokens, y_stride,
    M0: tl.constexpr, M1: tl.constexpr, M2: tl.constexpr, MODULES: tl.constexpr,
    W0: tl.constexpr, W1: tl.constexpr, W2: tl.constexpr, ROW: tl.constexpr,
    PAGE: tl.constexpr, VEC: tl.constexpr, MAX_RANK: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Same equation, arguments and grid as expand_decode; BLOCK_T tokens of a tile at once, on tensor cores, which take
    h in the dtype of B.
    """
    block, tile = tl.program_id(0), tl.program_id(1)
    slot = tl.load(tiles + 3 * tile + 2)
    if slot < 0:
        return
    BLOCKS_0: tl.constexpr = (W0 + BLOCK_N - 1) // BLOCK_N
    BLOCKS_1: tl.constexpr = BLOCKS_0 + (W1 + BLOCK_N - 1) // BLOCK_N
    group = (block >= BLOCKS_0).to(tl.int32) + (block >= BLOCKS_1).to(tl.int32)
    offset = tl.load(meta + slot * _META + _B + _pick(group, M0, M1, M2))
    base = tl.load(first_elem + slot * layers + layer)
    if (offset < 0) | (base < 0):
        return
    token = tl.load(tiles + 3 * tile) + tl.arange(0, BLOCK_T)
    own = token < tl.load(tiles + 3 * tile + 1)
    rank = tl.load(meta + slot * _META + _RANK)
    slab = tl.load(meta + slot * _META + _SLAB)
    factor = tl.load(scale + slot)
    pages += slot.to(tl.int64) * max_pages
    width = _pick(group, W0, W1, W2)
    column = (block - _pick(group, 0, BLOCKS_0, BLOCKS_1)) * BLOCK_N + tl.arange(0, BLOCK_N)
    total = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float32)
    for row in range(0, rank, BLOCK_R):
        rows = row + tl.arange(0, BLOCK_R)
        live = rows < rank
        start = base + offset + rows.to(tl.int64) * slab
        first, second, left = _find_rows(pages, start, live, width, PAGE, VEC)
        b = _load_rows(arena, pages, start, first, second, left, column, live, width, ROW, PAGE, VEC)
        value = tl.zeros([BLOCK_T, BLOCK_R], dtype=tl.float32)
        for split in tl.range(SPLITS, num_stages=1):  # unrolled, the parts would take registers of their own
            at = ((split * tokens + token).to(tl.int64) * MODULES + group) * MAX_RANK
            value += tl.load(h + at[:, None] + rows[None, :], mask=own[:, None] & live[None, :], other=0.0)
        total = tl.dot(value.to(b.dtype), b, total, input_precision="ieee")
    target = y + token.to(tl.int64)[:, None] * y_stride + _pick(group, 0, W0, W0 + W1) + column[None, :]
    mask = own[:, None] & (column < width)[None, :]
    after = tl.load(target, mask=mask, other=0.0).to(tl.float32) + factor * total
    tl.store(target, after.to(y.dtype.element_ty), mask=mask)


def sgmv(
    y: torch.Tensor,
    x: torch.Tensor,
    arena: torch.Tensor,
    tables: SgmvTables,
    layer: int,
    modules: Sequence[tuple[int, int, int]],
    schedule: Schedule,
    num_tiles: int,
    passes: int = 1,
    *,
    compile_only: bool = False,
) -> None:
    """Add the LoRA product of every planned tile to y, in place: what `sgmv.sgmv` does for `Segments`.

    y: `[tokens, out]`, the packed outputs of the projections that share x `[tokens, in]`.
    arena: `[num_pages, page_elems]`. modules: at most three of (module id, first column in y, width), side by side.
    num_tiles: the bucket's, at least what `tables.plan` returned for `schedule.tile_tokens`. passes: at least
    `tables.passes`; each adds to what those before it have left in y. compile_only: have the kernels compiled, beside
    each other within `compiling`, and launch nothing.
    """
    tokens, d_in = x.shape
    if not tokens or not num_tiles:
        return
    if x.stride(1) != 1 or y.stride(1) != 1 or not arena.is_contiguous():
        raise ValueError("pages lie side by side; rows of x and y are contiguous")
    launch = _launch(schedule, tuple(modules), d_in, arena.shape[1], arena.element_size(), tables.max_rank)
    if tables.h.numel() < tables.scratch_elems(launch.splits, tokens, len(modules), tables.max_rank):
        raise ValueError(f"h has no room for the partial sums of {tokens} tokens in {launch.splits} splits")
    places = (tables.first_elem, tables.pages, layer, tables.first_elem.shape[1], tables.pages.shape[1], tokens)
    shrink = shrink_prefill if schedule.tensor_cores else shrink_decode
    expand = expand_prefill if schedule.tensor_cores else expand_decode
    shrink_grid, expand_grid = (num_tiles, launch.groups, launch.splits), (launch.blocks, num_tiles)
    for tiles in tables.tiles_of_pass[:passes]:
        shrunk = tables.h, x, arena, tiles, tables.meta, *places, x.stride(0)
        expanded = y, tables.h, arena, tiles, tables.meta, tables.scale, *places, y.stride(0)
        if compile_only:
            shrink.warmup(*shrunk, grid=shrink_grid, **launch.shrink)
            expand.warmup(*expanded, grid=expand_grid, **launch.expand)
        else:
            shrink[shrink_grid](*shrunk, **launch.shrink)
            expand[expand_grid](*expanded, **launch.expand)


@contextmanager
def compiling(threads: int) -> Iterator[None]:
    """Inside, what is only compiled is so on `threads` threads; leaving waits for all of it, and raises what failed.

    The compiler's parts run outside Python. Before triton 3.5, kernels are compiled one after another.
    """
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        yield
        return
    with ThreadPoolExecutor(threads) as pool, mode(pool):
        yield


class _Launch(NamedTuple):
    """Constants of every launch of a schedule over a group of projections."""

    splits: int
    groups: int
    blocks: int
    shrink: dict[str, int | bool]
    expand: dict[str, int | bool]


@cache
def _launch(
    schedule: Schedule, modules: tuple[tuple[int, int, int], ...], d_in: int, page_elems: int, itemsize: int, rank: int
) -> _Launch:
    columns = [sum(width for _, _, width in modules[:index]) for index in range(len(modules))]
    if len(modules) > 3 or columns != [column for _, column, _ in modules]:
        raise ValueError("outputs of at most three projections, side by side")
    if page_elems * itemsize % 16:
        raise ValueError("pages are multiples of 16 bytes")
    shape, options = (schedule, modules, d_in, page_elems, itemsize, rank), schedule.options()
    return _Launch(
        splits=schedule.splits(d_in),
        groups=len(modules) * schedule.lanes,
        blocks=sum(-(-width // schedule.block_n) for _, _, width in modules),
        shrink=shrink_constants(*shape) | options,
        expand=expand_constants(*shape) | options,
    )
