"""GEMM of any number of rows with narrow weights on a GPU, as the first operand of the matrix instruction.

    y[t] = x[t] @ Wᵀ (+ bias)        summed in float32

A matrix instruction takes its first operand from registers. Weights of 4 or 8 bits are widened there, between the load
and the instruction, and are never written to shared or device memory in 16 bits. Rows of x are the second operand, from
shared memory. The product is yᵀ, `[columns, rows]`.

`small_gemm_triton` takes up to 64 rows, with the weights as the second operand. It splits the inputs among warps, which
keeps a GPU busy with few rows, computes the activation and expands adapters. This kernel takes any number of rows and
reads a weight once for every 128 of them, where the library would need a widened copy in memory.

Inputs are summed in order, in blocks that depend only on the weight, and tiles are padded with zeros. A row gets the
same bits alone, among others, at any index and in a tile of any size.

Import this module lazily: it needs triton. Tests: tests/ops/gemm/test_swapped_gemm.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..launch_triton import KernelLauncher
from .narrow_weights import FLOAT4_GROUP, NarrowWeight
from .narrow_weights_triton import float8_values, scaled_float4, sixteen_more
from .small_gemm_schedule import WeightForm
from .small_gemm_triton import _load_scale, _load_weight, form_of, parts_of
from .swapped_gemm_schedule import SwappedConstants, Tile, swapped_constants, swapped_options, tile_of

_FLOAT4_GROUP = tl.constexpr(FLOAT4_GROUP)


@triton.jit
def _widened(w, zero, dtype: tl.constexpr, C: tl.constexpr):
    """Stored numbers `[columns, inputs]` less the zero points, in 16 bits, which hold them exactly.

    w, zero: as `_load_weight` loads them.
    """
    HALF: tl.constexpr = tl.bfloat16 if dtype == tl.bfloat16 else tl.float16
    if C.float8:
        numbers = float8_values(w, HALF)
    elif C.bits == 4:
        numbers = sixteen_more(w, HALF)
        numbers -= (16.0 + zero).to(HALF) if C.zeros else 16.0 + zero
    else:
        numbers = w.to(tl.float32) - zero
    return numbers.to(dtype)


@triton.jit
def sum_products(rows, own_row, weight, row, own_column, dtype: tl.constexpr, C: tl.constexpr):
    """Σ_k weight[row, k] · x[t, k] in float32, `[columns, rows]`, for rows `row` of a weight and rows of x.

    rows: pointers to the first inputs of x's rows, own_row: which of them there are, `[1, rows]`. weight:
    `small_gemm_triton.Weight`. row: int64, own_column: which of them there are, `[columns, 1]`. C: `SwappedConstants`.

    A block of inputs has one scale for each column. It multiplies the block's sum, in float32; those of MXFP4 multiply
    the weights.
    """
    BLOCK_T: tl.constexpr = C.block_t
    BLOCK_N: tl.constexpr = C.block_n
    BLOCK_K: tl.constexpr = C.block_k
    BLOCKS: tl.constexpr = C.blocks
    D_IN: tl.constexpr = C.d_in
    HAS_TWO_SUMS: tl.constexpr = C.groups > 1 and not C.float4
    data = weight.data + row * (D_IN * C.bits // C.unit)
    scales, zeros = weight.scales + row * C.groups, weight.zeros + row * C.groups
    if not C.float4:
        scale, zero = _load_scale(scales, zeros, own_column, C)
    k = tl.arange(0, BLOCK_K)[:, None]
    of_row = rows + k
    total = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
    for first in tl.range(0, D_IN, BLOCK_K * BLOCKS, num_stages=C.stages):
        product = tl.zeros((BLOCK_N, BLOCK_T), dtype=tl.float32)
        for block in tl.static_range(0, BLOCKS):
            step = first + block * BLOCK_K
            if C.float4:
                at = step // 8 + tl.arange(0, BLOCK_K // 8)[None, :]
                w = tl.load(data + at, mask=own_column & (at < D_IN // 8), other=0)
                group = step // _FLOAT4_GROUP + tl.arange(0, BLOCK_K // _FLOAT4_GROUP)[None, :]
                exponents = tl.load(scales + group, mask=own_column & (group < C.groups), other=0)
                numbers = scaled_float4(w, exponents, dtype)
            else:
                w, its_scale, its_zero = _load_weight(data, scales, zeros, step, own_column, scale, zero, C)
            value = tl.load(of_row + step, mask=own_row & (step + k < D_IN), other=0.0)
            if not C.float4:
                numbers = _widened(w, its_zero, dtype, C)
            if HAS_TWO_SUMS:
                product = tl.dot(numbers, value, product, input_precision="ieee")
            else:
                total = tl.dot(numbers, value, total, input_precision="ieee")
        if HAS_TWO_SUMS:
            total = tl.fma(product, its_scale, total)
    if C.groups == 1 and not C.float4:
        total *= scale
    return total


@triton.jit(do_not_specialize=["rows"])
def multiply_swapped(y, x, weight, bias, rows, x_stride, C: tl.constexpr):
    """y[t, n] = Σ_k weight[n, k] · x[t, k] + bias[n], rounded.

    Grid (tiles of rows, blocks of columns): programs that read the same weights run one after the other, so that all
    but the first find them in the L2 cache. y: [rows, d_out], contiguous. x: [rows, d_in], rows x_stride apart.
    weight: `small_gemm_triton.Weight`, [d_out, d_in], contiguous. C: `SwappedConstants`.
    """
    BLOCK_N: tl.constexpr = C.block_n
    D_OUT: tl.constexpr = C.d_out
    dtype = y.dtype.element_ty
    row = tl.program_id(0) * C.block_t + tl.arange(0, C.block_t)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    own_row, own_column = (row < rows)[None, :], (column < D_OUT)[:, None]
    of_row = x + row.to(tl.int64)[None, :] * x_stride
    total = sum_products(of_row, own_row, weight, column.to(tl.int64)[:, None], own_column, dtype, C)
    if C.bias:
        total += tl.load(bias + column, mask=column < D_OUT, other=0.0).to(tl.float32)[:, None]
    place = y + row.to(tl.int64)[None, :] * D_OUT + column[:, None]
    tl.store(place, total.to(dtype), mask=own_row & own_column)


def multiply(
    x: torch.Tensor, weight: NarrowWeight, bias: torch.Tensor | None = None, *, compile_only: bool = False
) -> torch.Tensor:
    """Return `x @ weightᵀ + bias`, `[rows, out]`.

    x: `[rows, in]`. weight: `[out, in]`, contiguous. Its stored numbers are multiplied, and sums by the scales, as in
    `small_gemm_triton.multiply`; numbers of MXFP4 are those of `weight.dense()`. compile_only: compile the kernel that
    would be launched, in parallel within `launch_triton.compiling`, and compute nothing.
    """
    rows, d_in = x.shape
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("rows of x and the whole weight must be contiguous")
    y = torch.empty(rows, len(weight), dtype=x.dtype, device=x.device)
    if not rows:
        return y
    form = form_of(weight, d_in)
    launch, constants = _launch(len(weight), d_in, tile_of(rows, form), form, bias is not None)
    tensors = y, x, parts_of(weight), x if bias is None else bias
    if compile_only:
        launch.compile(tensors, (rows,), (x.stride(0),))
    else:
        grid = -(-rows // constants.block_t), -(-len(weight) // constants.block_n), 1
        launch(grid, tensors, (rows,), (x.stride(0),))
    return y


@cache
def _launch(
    outputs: int, d_in: int, tile: Tile, form: WeightForm, bias: bool
) -> tuple[KernelLauncher, SwappedConstants]:
    constants = swapped_constants(d_in, outputs, tile, form, bias=bias)
    return KernelLauncher(multiply_swapped, {"C": constants, **swapped_options(tile, form)}), constants


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false
