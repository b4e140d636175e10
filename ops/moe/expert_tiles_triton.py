"""Products of rows with the experts that they go to, on a GPU: one Triton launch for all experts of a layer.

Import this module lazily: it needs triton. Tests: tests/ops/moe/test_expert_tiles_interpreted.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from .. import dependent_launch
from ..elementwise.gates_triton import gated
from ..gemm.narrow_weights import FLOAT4_GROUP
from ..gemm.narrow_weights_triton import float4_values, powers_of
from ..gemm.small_gemm_triton import _add_product, _load_scale, _load_weight, form_of, parts_of
from ..launch_triton import KernelLauncher
from .expert_tiles import ExpertTiles, Stack
from .expert_tiles_schedule import Gate, TileConstants, swapped, tile_constants, tile_options
from .find_tile_triton import find_tile

_FLOAT4_GROUP = tl.constexpr(FLOAT4_GROUP)


@triton.jit
def _load_float4(data, scales, step, own, dtype: tl.constexpr, C: tl.constexpr):
    """Load the weights of a program's columns for the inputs from `step` on, `[columns, inputs]`, of MXFP4.

    data, scales: of the columns' first input, `[columns, 1]`. Powers of 2 multiply weights exactly in bf16, which has
    float32's range.
    """
    GROUPS: tl.constexpr = C.block_k // _FLOAT4_GROUP
    HALF: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    WIDE: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float32
    at = step // 8 + tl.arange(0, C.block_k // 8)[None, :]
    values = float4_values(tl.load(data + at, mask=own & (at < C.d_in // 8), other=0), HALF)
    group = step // _FLOAT4_GROUP + tl.arange(0, GROUPS)[None, :]
    powers = powers_of(tl.load(scales + group, mask=own & (group < C.groups), other=0)).to(WIDE)
    each = tl.broadcast_to(tl.expand_dims(powers, 2), (C.block_n, GROUPS, _FLOAT4_GROUP))
    return (values.to(WIDE) * tl.reshape(each, (C.block_n, C.block_k))).to(dtype)


@triton.jit
def multiply_tiles(y, x, weight, bias, pairs, expert_of, first_of, end_of, x_stride, C: tl.constexpr):
    """y[p, n] = Σ_k x[p // per_row, k] · weight[e, n, k] + bias[e, n], rounded, for pairs p of each tile's expert e.

    With gating, y is `gated` of these results for weight[e, n] and weight[e, d_out + n], each rounded first.

    Grid (tiles, blocks of a matrix's rows). y: [rows · per_row, d_out], contiguous. x: [rows, d_in], rows x_stride
    apart. weight: `small_gemm_triton.Weight`, [experts, d_out or 2 · d_out, d_in]; bias: [experts, the same];
    contiguous. pairs: see `ExpertTiles`, as for the others. C: `TileConstants`.

    The inputs are summed in order, and a tile is padded with zeros, so a row's bits don't depend on its company.
    """
    BLOCK_T: tl.constexpr = C.block_t
    BLOCK_N: tl.constexpr = C.block_n
    BLOCK_K: tl.constexpr = C.block_k
    D_IN: tl.constexpr = C.d_in
    D_OUT: tl.constexpr = C.d_out
    GATED: tl.constexpr = C.gating is not None
    ROWS: tl.constexpr = 2 * D_OUT if GATED else D_OUT
    dtype = y.dtype.element_ty
    has_pairs, expert, pair, own = find_tile(pairs, expert_of, first_of, end_of, C)
    if has_pairs:
        column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        own_column = column < ROWS
        if GATED:  # rows of gate and of up alternate, so that one thread has both of a result
            column = column // 2 + column % 2 * D_OUT
        k = tl.arange(0, BLOCK_K)
        rows = x + (pair // C.per_row)[:, None] * x_stride + k[None, :]
        if C.bits < 16:
            row, own_row = (expert * ROWS + column)[:, None], own_column[:, None]
            data = weight.data + row * (D_IN * C.bits // C.unit)
            scales, zeros = weight.scales + row * C.groups, weight.zeros + row * C.groups
            if not C.float4:
                scale, zero = _load_scale(scales, zeros, own_row, C)
        else:
            columns = weight.data + (expert * ROWS + column)[None, :] * D_IN + k[:, None]
        total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
        for step in tl.range(0, D_IN, BLOCK_K, num_stages=C.stages):
            inside = step + k < D_IN
            value = tl.load(rows + step, mask=own[:, None] & inside[None, :], other=0.0)
            if C.float4:
                w = tl.trans(_load_float4(data, scales, step, own_row, dtype, C))
                total = tl.dot(value, w, total, input_precision="ieee")
            elif C.bits < 16:
                w, its_scale, its_zero = _load_weight(data, scales, zeros, step, own_row, scale, zero, C)
                total = _add_product(total, value, w, its_scale, its_zero, dtype, C)
            else:
                w = tl.load(columns + step, mask=inside[:, None] & own_column[None, :], other=0.0)
                total = tl.dot(value, w, total, input_precision="ieee")
        if C.bias:
            total += tl.load(bias + expert * ROWS + column, mask=own_column, other=0.0).to(tl.float32)[None, :]
        value = total.to(dtype)
        if GATED:
            gate, up = tl.split(tl.reshape(value, (BLOCK_T, BLOCK_N // 2, 2)))
            value = gated(gate.to(tl.float32), up.to(tl.float32), dtype, C)
            column = tl.program_id(1) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
            own_column = column < D_OUT
        out = y + pair[:, None] * D_OUT + column[None, :]
        tl.store(out, value, mask=own[:, None] & own_column[None, :])


def multiply(
    x: torch.Tensor,
    stack: Stack,
    tiles: ExpertTiles,
    per_row: int,
    gate: Gate | None = None,
    *,
    swaps: bool = False,
    is_wide: bool = False,
) -> torch.Tensor:
    """Multiply rows by the matrices of the experts that they go to, and add these' biases, in float32.

    x: `[rows, inputs]`. per_row: experts of each of them. gate: the matrices are gate and up, and this is computed of
    their results, with the bits of the activation by itself. swaps: narrow weights are the first operand, by
    `swapped_tiles_triton`. is_wide: see `tile_constants`. Returns `[rows · per_row, outputs]` in x's dtype, by pair.
    A row's bits don't depend on other rows of a step with tiles of as many rows, or of any size if operands are
    swapped. MXFP4 is widened as it is loaded, to the numbers of `weight.dense()`; other narrow weights as
    `small_gemm_triton.multiply` has them.
    """
    weight, bias = stack.data, stack.bias
    experts, matrix_rows, d_in = weight.shape
    d_out = matrix_rows if gate is None else matrix_rows // 2
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("rows of x, and the weights, must be contiguous")
    y = torch.empty(len(x) * per_row, d_out, dtype=x.dtype, device=x.device)
    form = form_of(weight, d_in)
    constants = tile_constants(
        d_in,
        d_out,
        tiles.block_t,
        x.itemsize,
        per_row=per_row,
        experts=experts,
        bias=bias is not None,
        form=form,
        gate=gate,
        of_pairs=tiles.of_pairs,
        pdl=dependent_launch.begins_early(x.device),
        is_wide=is_wide,
    )
    constants = swapped(constants, form, is_wide=is_wide) if swaps and form.bits < 16 else constants
    grid = len(tiles.expert), -(-matrix_rows // constants.block_n), 1
    tables = tiles.pairs, tiles.expert, tiles.first, tiles.end
    _launcher(constants)(grid, (y, x, parts_of(weight), y if bias is None else bias, *tables), (), (x.stride(0),))
    return y


@cache
def _launcher(constants: TileConstants) -> KernelLauncher:
    options = {**tile_options(constants), **dependent_launch.options(constants.pdl)}
    if type(constants) is TileConstants:
        return KernelLauncher(multiply_tiles, {"C": constants, **options})
    from .swapped_tiles_triton import multiply_swapped_tiles  # here, as lines above kernels are part of their keys

    return KernelLauncher(multiply_swapped_tiles, {"C": constants, **options})


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportAttributeAccessIssue=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false, reportAssignmentType=false
