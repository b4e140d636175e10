"""GEMM of a few rows on a GPU, bound by reading the weight once: one Triton launch.

    y[t] = x[t] @ Wᵀ (+ bias) (+ scale · h[t] @ Bᵀ)        for up to MAX_ROWS rows t, summed in float32

In a tile of 16 rows, each warp of a program sums a part of the inputs (split K) for all of the program's columns, and
the program adds the parts in a fixed order. In a tile of 64 rows, all warps sum all inputs together. Therefore no
partial sum goes through memory, and there is no second launch and no atomic addition. The parts and their order depend
only on the tile and the weight's shape, and a tile is padded with zeros. Within a tile a row gets the same bits alone,
among others, and at any index.

The same launch may also expand the rows' adapters: SGMV's shrink runs before it (Punica §4), and each program expands
its own columns. TILES tiles of a step are multiplied at once, each with its own rank-rows. Their rank-rows and the
partial sums of shrink are loaded while the weight is read. With more tiles than that, the others follow after the GEMM.
They wait for their loads then, which come from the L2 cache where launches begin early.

Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as cuda

from .. import dependent_launch
from ..launch_triton import KernelLauncher
from ..lora.sgmv_schedule import ExpandShape
from ..lora.sgmv_tables import BEGIN, PLACE_ROWS, RANK, SCALE, SLAB, TABLE_ROW, TILE_WIDTH
from ..lora.sgmv_triton import (
    Adapters,
    Shrunk,
    _block_of,
    _column_of,
    _find_block,
    _find_columns,
    _find_module,
    _module_of,
    _width_of,
)
from .narrow_weights import NarrowWeight
from .narrow_weights_triton import float8_values, sixteen_more
from .small_gemm_schedule import (
    FULL,
    MAX_EXPANDED_ROWS,
    MAX_ROWS,
    WeightForm,
    gemm_constants,
    gemm_options,
    gemm_schedule,
    tile_rows,
)

#: Bits of a cache line, and those of a row that one prefetch step covers.
_LINE, _LINES = tl.constexpr(1024), tl.constexpr(4096)

_BEGIN, _TABLE_ROW, _RANK, _SLAB, _SCALE = (tl.constexpr(at) for at in (BEGIN, TABLE_ROW, RANK, SLAB, SCALE))
_TILE, _ROWS = (tl.constexpr(at) for at in (TILE_WIDTH, PLACE_ROWS))


class Weight(NamedTuple):
    """A weight as one argument: tensors on the host, pointers in a kernel. One in 16 bits or more stands for all three.

    data: `[out, in]`, or as in `NarrowWeight`, in words of 32 bits if `WeightForm.unit` says so. scales, zeros:
    `[out, groups]`; without zero points, zeros is any tensor.
    """

    data: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor


@triton.jit
def _prefetch(pointers):
    """Fetch the cache lines at these addresses into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def _load_weight(data, scales, zeros, step, own, scale, zero, C: tl.constexpr):
    """Load the weights of a program's columns for the inputs from `step` on: stored numbers, `[(splits,) columns,
    numbers]`, their scales and their zero points.

    data, scales, zeros: of the columns' first input and group, `[(1,) columns, 1]`. scale, zero: of the columns, where
    all inputs have the same.
    """
    SPLITS: tl.constexpr = C.splits
    BLOCK: tl.constexpr = C.block_k * C.bits // C.unit
    at = tl.arange(0, BLOCK)[None, :]
    if SPLITS > 1:
        at = tl.expand_dims(at, 0) + tl.arange(0, SPLITS)[:, None, None] * BLOCK
    at += step * C.bits // C.unit
    w = tl.load(data + at, mask=own & (at < C.d_in * C.bits // C.unit), other=0)
    if C.groups > 1:
        group, inside = step // C.group, own
        if SPLITS > 1:
            group = (step + tl.arange(0, SPLITS)[:, None, None] * C.block_k) // C.group
            inside = own & (group < C.groups)
        scale = tl.load(scales + group, mask=inside, other=0.0)
        if C.zeros:
            zero = tl.load(zeros + group, mask=inside, other=0.0)
    return w, scale, zero


@triton.jit
def _sum_inputs(value, dtype: tl.constexpr):
    """Sums of the inputs of each row, `[splits, rows, 1]`, by matrix instructions: sixteen times the same."""
    ones = tl.full((value.shape[0], value.shape[2], 16), 1.0, dtype)
    return tl.max(tl.dot(value, ones, input_precision="ieee"), axis=2, keep_dims=True)


@triton.jit
def _add_product(total, value, w, scale, zero, dtype: tl.constexpr, C: tl.constexpr):
    """Add the products of rows `[(splits,) rows, inputs]` with weights as `_load_weight` loads them.

    Narrow weights are multiplied as their stored numbers, less the zero points, which bf16 and fp16 hold exactly; sums
    of a block are multiplied by the scales, in float32. Of 4 bits they are had with 16 added, as that needs no
    conversion. Where warps split the inputs, it leaves a block's sum with the zero points, times the sum of the inputs,
    for which each needs few instructions; else it leaves the weights.
    """
    HALF: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    if C.bits == 16:
        total = tl.dot(value, tl.trans(w), total, input_precision="ieee")
    else:
        if C.float8:
            numbers = float8_values(w, HALF)
        elif C.bits == 4:
            numbers = sixteen_more(w, HALF)
            if C.splits == 1:
                numbers -= (16.0 + zero).to(HALF) if C.zeros else 16.0 + zero
        else:
            numbers = w.to(tl.float32) - zero
        product = tl.dot(value, tl.trans(numbers.to(dtype)), input_precision="ieee")
        if C.bits == 4 and C.splits > 1:
            zeros = tl.trans(zero) if C.zeros else zero
            product = tl.fma(_sum_inputs(value, dtype), -16.0 - zeros, product)
        total = tl.fma(product, tl.trans(scale), total)
    return total


@triton.jit
def _load_scale(scales, zeros, own, C: tl.constexpr):
    """Scales and zero points of columns whose inputs share them, else numbers that are not used."""
    scale, zero = 1.0, 1.0 * (1 << (C.bits - 1))
    if C.bits < 16 and C.groups == 1:
        scale = tl.load(scales, mask=own, other=0.0)
        if C.zeros:
            zero = tl.load(zeros, mask=own, other=0.0)
    return scale, zero


@triton.jit
def _finish(total, bias, column, own, dtype: tl.constexpr, BIAS: tl.constexpr):
    """Return the sum `[rows, columns]`, with the bias, rounded.

    Parts `[4, rows, columns]` are added as (0 + 1) + (2 + 3), however the threads hold them.
    """
    value = total
    if len(total.shape) > 2:
        rows: tl.constexpr = total.shape[1]
        columns: tl.constexpr = total.shape[2]
        even, odd = tl.split(tl.reshape(tl.permute(total, (1, 2, 0)), [rows, columns, 2, 2]))
        first, second = tl.split(even + odd)
        value = first + second
    if BIAS:
        value += tl.load(bias + column, mask=own, other=0.0).to(tl.float32)[None, :]
    return value.to(dtype)


@triton.jit
def _load_tiles(tiles, first, num_tiles, TILES: tl.constexpr):
    """Load TILES tiles from `first` on, each value `[1, TILES]`.

    Return the token, or -1 for a tile without work; the table row, or 0; the rank, the slab and the scale.
    """
    index = first + tl.arange(0, TILES)[None, :]
    given = index < num_tiles
    place = tiles + index * _TILE
    table_row = tl.load(place + _TABLE_ROW, mask=given, other=-1)
    token = tl.load(place + _BEGIN, mask=given, other=-1)
    rank = tl.load(place + _RANK, mask=given, other=0)
    slab = tl.load(place + _SLAB, mask=given, other=0)
    scale = tl.load(place + _SCALE, mask=given, other=0).to(tl.float32, bitcast=True)
    return tl.where(table_row >= 0, token, -1), tl.maximum(table_row, 0), tl.where(table_row >= 0, rank, 0), slab, scale


@triton.jit
def _find_rank_rows(adapters, level, tile, module, row, column, width, C: tl.constexpr):
    """Locate columns `column` of the rank-rows of a module's Bᵀ, from `row` on, for each tile.

    Return the arena elements `[PLACE_ROWS, TILES, columns]`, a mask of those that exist, and a mask of the rank-rows
    that belong to an adapter, `[PLACE_ROWS, TILES]`. level: the layer, and the lengths of rows of first_elem and pages.
    """
    layer, layers, max_pages = level
    PAGES: tl.constexpr = C.records.pages
    table_row, rank, slab = tile[1], tile[2], tile[3]
    rows = row + tl.arange(0, _ROWS)[:, None]
    offset = tl.load(adapters.offsets + table_row * (2 * C.records.modules) + C.records.modules + module)
    is_changed, start, found = _find_block(adapters, table_row, layer, layers, offset, slab, row, rows, C)
    near = ()
    for i in tl.static_range(PAGES):
        near = near + (tl.expand_dims(found[i], 2),)  # noqa: RUF005, Triton's tuples are not unpacked
    own = is_changed & (rows < rank)
    of_table_row = tl.expand_dims(adapters.pages + table_row.to(tl.int64) * max_pages, 2)
    at, mask = _find_columns(of_table_row, near, start, column, own, width, C)
    return at, mask, own


@triton.jit
def _load_rank_rows(adapters, level, tile, module, row, column, width, C: tl.constexpr):
    """Load columns of rank-rows, zero beyond an adapter's own, and the mask of its own; see `_find_rank_rows`."""
    at, mask, own = _find_rank_rows(adapters, level, tile, module, row, column, width, C)
    return tl.load(adapters.arena + at, mask=mask, other=0.0), own


@triton.jit
def _fetch_rank_rows(adapters, level, tile, module, block, width, C: tl.constexpr):
    """Fetch the tiles' first rank-rows into the L2 cache: lines of the program's first and last columns."""
    ends = tl.minimum(block * C.block_n + tl.arange(0, 2) * (C.block_n - 1), width - 1)
    at, mask, _ = _find_rank_rows(adapters, level, tile, module, 0, ends, width, C)
    _prefetch(adapters.arena + tl.where(mask, at, 0))


@triton.jit
def _load_shrunk(h, tile, tokens, group, row, own, C: tl.constexpr):
    """Load the tiles' partial sums of rank-rows from `row` on, `[part_block, PLACE_ROWS, TILES]`; 0 if not own."""
    WIDTH: tl.constexpr = C.records.blocks * _ROWS
    part = tl.arange(0, C.part_block)[:, None, None]
    at = ((part * tokens + tl.maximum(tile[0], 0)[None, :, :]) * C.modules.count + group) * WIDTH + row
    return tl.load(h + at + tl.arange(0, _ROWS)[None, :, None], mask=(part < C.parts) & own[None, :, :], other=0.0)


@triton.jit
def _product(parts, b):
    """Sum the parts, times the rank-rows: `[TILES, columns]`."""
    return tl.sum(tl.expand_dims(tl.sum(parts, axis=0), 2) * b.to(tl.float32), axis=0)


@triton.jit
def _to_rows(total, tile, token):
    """Put each tile's values, times its scale, at its token's row, `[rows, columns]`, and 0 elsewhere.

    Each is a sum of one value and zeros, which one thread adds up alone.
    """
    is_own = tl.trans(tile[0]) == token[None, :]
    return tl.sum(tl.where(is_own[:, :, None], (total * tl.trans(tile[4]))[:, None, :], 0.0), axis=0)


@triton.jit
def _expand(
    parts,
    b,
    adapters,
    level,
    num_tiles,
    tokens,
    token,
    tile,
    group,
    module,
    column,
    width,
    C: tl.constexpr,
):
    """Return the LoRA terms of the rows for a module's columns, `[rows, columns]`.

    The caller has loaded the partial sums and B for the first rank-rows of the first tiles.
    """
    TILES: tl.constexpr = C.tiles
    total = _product(parts, b)
    if C.records.blocks > 1:
        for row in tl.range(_ROWS, tl.max(tl.max(tile[2], axis=1), axis=0), _ROWS, num_stages=1):
            b, own = _load_rank_rows(adapters, level, tile, module, row, column, width, C)
            total += _product(_load_shrunk(adapters.h, tile, tokens, group, row, own, C), b)
    added = _to_rows(total, tile, token)
    for first in tl.range(TILES, num_tiles, TILES, num_stages=1):  # adapters of several parts
        more = _load_tiles(adapters.tiles, first, num_tiles, TILES)
        total = tl.zeros_like(total)
        for row in tl.range(0, tl.max(tl.max(more[2], axis=1), axis=0), _ROWS, num_stages=1):
            b, own = _load_rank_rows(adapters, level, more, module, row, column, width, C)
            total += _product(_load_shrunk(adapters.h, more, tokens, group, row, own, C), b)
        added += _to_rows(total, more, token)
    return added


@triton.jit
def _add(value, added):
    """Add in float32 and round; a value to which nothing is added keeps its bits."""
    return tl.where(added == 0.0, value, (value.to(tl.float32) + added).to(value.dtype))


@triton.jit(do_not_specialize=["tokens", "layer", "layers", "max_pages", "num_tiles"])
def multiply_rows(y, x, weight, bias, adapters, tokens, layer, layers, max_pages, num_tiles, x_stride, C: tl.constexpr):
    """y[t, n] = Σ_k x[t, k] · weight[n, k] + bias[n], rounded; with adapters plus the terms of `expand_decode`.

    With silu, y = silu(gate) · up, where gate and up are these results for weight[n] and weight[d_out + n], each
    rounded first, as `silu_and_mul_rows` rounds.

    Grid (blocks of columns of all modules,); with silu, of the gate's columns. y: [tokens, d_out], contiguous. x:
    [tokens, d_in], rows x_stride apart. weight: `Weight`, [d_out or 2 · d_out, d_in], contiguous. See `expand_decode`
    for adapters, layer, layers and max_pages. C: `GemmConstants`. The first num_tiles tiles have one token each, and at
    most one tile of a token changes a module.

    With pdl, the kernel fetches the first weights into the L2 cache and loads rank-rows before the previous launch has
    ended.
    """
    PDL: tl.constexpr = C.pdl
    SILU: tl.constexpr = C.silu
    MODULES: tl.constexpr = C.modules.count if C.parts else 0
    BLOCK_T: tl.constexpr = C.block_t
    BLOCK_N: tl.constexpr = C.block_n
    BLOCK_K: tl.constexpr = C.block_k
    SPLITS: tl.constexpr = C.splits
    D_IN: tl.constexpr = C.d_in
    D_OUT: tl.constexpr = C.d_out
    if PDL:
        cuda.gdc_launch_dependents()
    PERIOD: tl.constexpr = SPLITS * BLOCK_K
    SUMS: tl.constexpr = (SPLITS, BLOCK_T, BLOCK_N) if SPLITS > 1 else (BLOCK_T, BLOCK_N)
    ROW: tl.constexpr = D_IN * C.bits // C.unit
    LINE: tl.constexpr = _LINE // C.unit
    FETCHED: tl.constexpr = min(C.fetched * 16 // C.unit, ROW // LINE * LINE)
    block = tl.program_id(0)
    dtype = y.dtype.element_ty
    group, begin, width = 0, 0, C.modules.widths[0]
    if MODULES > 1 and not SILU:
        group = _find_module(block, C)
        begin, width = _column_of(group, C), _width_of(group, C)
        block -= _block_of(group, C)
    within = block * BLOCK_N + tl.arange(0, BLOCK_N)
    own_column = within < width
    column = begin + within
    token = tl.arange(0, BLOCK_T)
    own_token = token < tokens
    if PDL:
        lines = tl.arange(0, _LINES // _LINE)[None, :] * LINE
        first = weight.data + tl.minimum(column, D_OUT - 1).to(tl.int64)[:, None] * ROW
        for step in tl.static_range(0, FETCHED, _LINES // C.unit):
            place = tl.minimum(step + lines, ROW - 1)
            _prefetch(first + place)
            if SILU:
                _prefetch(first + place + D_OUT * ROW)
    level = (layer, layers, max_pages)
    if MODULES:
        module, up = _module_of(group, C), C.modules.ids[1]
        tile = _load_tiles(adapters.tiles, 0, num_tiles, C.tiles)
        b, own = _load_rank_rows(adapters, level, tile, module, 0, within, width, C)
        if SILU:
            b_up, own_up = _load_rank_rows(adapters, level, tile, up, 0, within, width, C)
        if PDL:
            later = _load_tiles(adapters.tiles, C.tiles, num_tiles, C.tiles)
            _fetch_rank_rows(adapters, level, later, module, block, width, C)
            if SILU:
                _fetch_rank_rows(adapters, level, later, up, block, width, C)
    if PDL:
        cuda.gdc_wait()
    if MODULES:
        parts = _load_shrunk(adapters.h, tile, tokens, group, 0, own, C)
    total = tl.zeros(SUMS, dtype=tl.float32)
    if SILU:
        total_up = tl.zeros(SUMS, dtype=tl.float32)
    k = tl.arange(0, BLOCK_K)[None, :]
    row, rows = column.to(tl.int64)[:, None], x + token.to(tl.int64)[:, None] * x_stride
    w_own, x_own = own_column[:, None], own_token[:, None]
    if SPLITS > 1:
        k = tl.expand_dims(k, 0) + tl.arange(0, SPLITS)[:, None, None] * BLOCK_K
        row, rows, w_own, x_own = row[None], rows[None], w_own[None], x_own[None]
    weights, scales, zeros = weight.data + row * ROW, weight.scales + row * C.groups, weight.zeros + row * C.groups
    scale, zero = _load_scale(scales, zeros, w_own, C)
    if SILU:
        weights_up, scales_up, zeros_up = weights + D_OUT * ROW, scales + D_OUT * C.groups, zeros + D_OUT * C.groups
        scale_up, zero_up = _load_scale(scales_up, zeros_up, w_own, C)
    for step in tl.range(0, D_IN, PERIOD, num_stages=C.stages):
        at = step + k
        w, its_scale, its_zero = _load_weight(weights, scales, zeros, step, w_own, scale, zero, C)
        value = tl.load(rows + at, mask=x_own & (at < D_IN), other=0.0)
        total = _add_product(total, value, w, its_scale, its_zero, dtype, C)
        if SILU:
            w, its_scale, its_zero = _load_weight(weights_up, scales_up, zeros_up, step, w_own, scale_up, zero_up, C)
            total_up = _add_product(total_up, value, w, its_scale, its_zero, dtype, C)
    out = _finish(total, bias, column, own_column, dtype, C.bias)
    if MODULES:
        if SILU:  # here, during the sum's last loads: loaded earlier they would take registers from it
            parts_up = _load_shrunk(adapters.h, tile, tokens, 1, 0, own_up, C)
        added = _expand(
            parts,
            b,
            adapters,
            level,
            num_tiles,
            tokens,
            token,
            tile,
            group,
            module,
            within,
            width,
            C,
        )
        out = _add(out, added)
    if SILU:
        result = _finish(total_up, bias + D_OUT, column, own_column, dtype, C.bias)
        if MODULES:
            added = _expand(
                parts_up,
                b_up,
                adapters,
                level,
                num_tiles,
                tokens,
                token,
                tile,
                1,
                up,
                within,
                width,
                C,
            )
            result = _add(result, added)
        gate = out.to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out = (silu * result.to(tl.float32)).to(dtype)
    place = y + token.to(tl.int64)[:, None] * D_OUT + column[None, :]
    tl.store(place, out, mask=own_token[:, None] & own_column[None, :])


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor | NarrowWeight,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = False,
    shrunk: Shrunk | None = None,
    out: torch.Tensor | None = None,
    compile_only: bool = False,
) -> torch.Tensor:
    """Return `x @ weightᵀ + bias`, `[rows, out]`; with `silu`, `silu(gate) · up` of its halves, `[rows, out / 2]`.

    x: `[rows, in]`, at most MAX_ROWS. weight: `[out, in]`, contiguous. A narrow weight's stored numbers are multiplied,
    and sums by the scales, so these products are closer to it than those of `weight.dense()`, which is rounded. shrunk:
    result of `Sgmv.shrink` for x, whose LoRA terms are to be added. out: where the result is written, contiguous, in
    x's dtype. compile_only: compile the kernels that would be launched, in parallel within `launch_triton.compiling`,
    and compute nothing.
    """
    tokens, d_in = x.shape
    if tokens > MAX_ROWS:
        raise ValueError(f"x has {tokens} rows; this GEMM takes at most {MAX_ROWS}")
    if shrunk is not None and tokens > MAX_EXPANDED_ROWS:
        raise ValueError(f"adapters of {tokens} rows can't be expanded in a GEMM; at most {MAX_EXPANDED_ROWS} rows can")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("rows of x and the whole weight must be contiguous")
    if isinstance(weight, NarrowWeight) and weight.float4:
        raise ValueError("this GEMM takes no MXFP4; swapped_gemm_triton does")
    shape = tokens, len(weight) // 2 if silu else len(weight)
    y = torch.empty(shape, dtype=x.dtype, device=x.device) if out is None else out
    if y.shape != shape or y.dtype != x.dtype or not y.is_contiguous():
        raise ValueError(f"out must be {list(shape)}, contiguous and in {x.dtype}")
    if not tokens:
        return y
    expanded = None if shrunk is None else shrunk.shape
    early = dependent_launch.begins_early(x.device)
    form = form_of(weight, d_in)
    launch, blocks = _launch(len(weight), d_in, tile_rows(tokens), form, bias is not None, silu, expanded, early)
    adapters, free = (Adapters(*(x,) * 7), (0,) * 4) if shrunk is None else (shrunk.adapters, shrunk.free)
    tensors, strides = (y, x, parts_of(weight), x if bias is None else bias, adapters), (x.stride(0),)
    if compile_only:
        launch.compile(tensors, (tokens, *free), strides)
    else:
        launch((blocks, 1, 1), tensors, (tokens, *free), strides)
    return y


def form_of(weight: torch.Tensor | NarrowWeight, d_in: int) -> WeightForm:
    """How a weight with rows of d_in inputs lies in memory."""
    if not isinstance(weight, NarrowWeight):
        return FULL
    group = weight.group if weight.group < d_in else 0
    return WeightForm(weight.bits, group, weight.zeros is not None, weight.float8, weight.float4)


def parts_of(weight: torch.Tensor | NarrowWeight) -> Weight:
    """A weight as a kernel's argument."""
    if not isinstance(weight, NarrowWeight):
        return Weight(weight, weight, weight)
    data = weight.data.view(torch.int32) if form_of(weight, weight.shape[-1]).unit == 32 else weight.data
    return Weight(data, weight.scales, weight.scales if weight.zeros is None else weight.zeros)


@cache
def _launch(
    outputs: int,
    d_in: int,
    tile: int,
    form: WeightForm,
    bias: bool,
    silu: bool,
    shape: ExpandShape | None,
    early: bool,
) -> tuple[KernelLauncher, int]:
    """Return a launcher for a weight of `outputs` rows and a tile of `tile` rows, and its number of programs."""
    schedule, d_out = gemm_schedule(outputs, tile, form, expanded=shape is not None), outputs // 2 if silu else outputs
    if shape is not None and sum(shape.widths) != outputs:
        raise ValueError(f"the modules' widths {shape.widths} must add up to the weight's {outputs} rows")
    widths = (d_out,) if silu or shape is None else shape.widths
    constants = gemm_constants(schedule, d_in, d_out, form, bias=bias, silu=silu, shape=shape)
    constants = replace(constants, pdl=early)
    options = {**gemm_options(schedule), **dependent_launch.options(early)}
    return KernelLauncher(multiply_rows, {"C": constants, **options}), schedule.blocks(widths, silu=silu)


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportAssignmentType=false
# pyright: reportAttributeAccessIssue=false
