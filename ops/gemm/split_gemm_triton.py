"""GEMM of 17 to 64 rows on a GPU in which several programs share the inputs of the same columns: one Triton launch.

    y[t] = x[t] @ Wᵀ (+ bias)        summed in float32

Each program writes its part of the sum. The one that arrives last adds the parts up, from the first inputs to the last,
whichever program it is. So a row's bits depend on the weight's shape alone.

Import this module lazily: it needs triton. Tests: tests/ops/gemm/test_split_gemm_triton.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as cuda

from .. import dependent_launch
from ..launch_triton import KernelLauncher
from .small_gemm_schedule import MAX_ROWS
from .small_gemm_triton import _prefetch
from .split_gemm_schedule import SplitConstants, split_options

#: Blocks of columns of any weight.
_MOST_BLOCKS = 1024


@triton.jit(do_not_specialize=["tokens"])
def multiply_parts(y, x, data, bias, partial, arrived, tokens, x_stride, C: tl.constexpr):
    """y[t, n] = Σ_k x[t, k] · data[n, k] + bias[n], rounded.

    Grid (blocks of columns, parts). y: [tokens, d_out], data: [d_out, d_in], contiguous. x: [tokens, d_in], rows
    x_stride apart. partial: float32 [blocks, parts, block_t, block_n]. arrived: int32 [blocks], 0 before and after the
    launch. C: `SplitConstants`.

    With pdl, the kernel fetches its first weights into the L2 cache before the previous launch has ended.
    """
    BLOCK_T: tl.constexpr = C.block_t
    BLOCK_N: tl.constexpr = C.block_n
    BLOCK_K: tl.constexpr = C.block_k
    PARTS: tl.constexpr = C.parts
    D_IN: tl.constexpr = C.d_in
    D_OUT: tl.constexpr = C.d_out
    SHARE: tl.constexpr = C.share
    FETCHED: tl.constexpr = C.fetched
    block, part = tl.program_id(0), tl.program_id(1)
    within = tl.arange(0, BLOCK_N)
    column = block * BLOCK_N + within
    own_column = column < D_OUT
    token = tl.arange(0, BLOCK_T)
    own_token = token < tokens
    begin = part * SHARE
    if C.pdl:
        cuda.gdc_launch_dependents()
        lines = tl.arange(0, 4)[None, :] * 64  # elements of a cache line
        first = data + tl.minimum(column, D_OUT - 1).to(tl.int64)[:, None] * D_IN
        for step in tl.static_range(0, FETCHED, 256):
            _prefetch(first + tl.minimum(begin + step + lines, D_IN - 1))
        cuda.gdc_wait()
    k = tl.arange(0, BLOCK_K)
    rows = x + token.to(tl.int64)[:, None] * x_stride
    weights = data + column.to(tl.int64)[:, None] * D_IN
    total = tl.zeros((BLOCK_T, BLOCK_N), dtype=tl.float32)
    for step in tl.range(begin, tl.minimum(begin + SHARE, D_IN), BLOCK_K, num_stages=C.stages):
        at = (step + k)[None, :]
        value = tl.load(rows + at, mask=own_token[:, None] & (at < D_IN), other=0.0)
        w = tl.load(weights + at, mask=own_column[:, None] & (at < D_IN), other=0.0)
        total = tl.dot(value, tl.trans(w), total, input_precision="ieee")
    place = token[:, None] * BLOCK_N + within[None, :]
    parts = partial + block.to(tl.int64) * (PARTS * BLOCK_T * BLOCK_N)
    tl.store(parts + part * (BLOCK_T * BLOCK_N) + place, total)
    tl.debug_barrier()  # all warps have written
    if tl.atomic_add(arrived + block, 1, sem="acq_rel", scope="gpu") < PARTS - 1:
        return
    tl.store(arrived + block, 0)
    # bypass the multiprocessor's own cache, which does not see the writes of others
    total = tl.load(parts + place, cache_modifier=".cg")
    for index in range(1, PARTS):
        total += tl.load(parts + index * (BLOCK_T * BLOCK_N) + place, cache_modifier=".cg")
    if C.bias:
        total += tl.load(bias + column, mask=own_column, other=0.0).to(tl.float32)[None, :]
    out = y + token.to(tl.int64)[:, None] * D_OUT + column[None, :]
    tl.store(out, total.to(y.dtype.element_ty), mask=own_token[:, None] & own_column[None, :])


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, compile_only: bool = False
) -> torch.Tensor:
    """Return `x @ weightᵀ + bias`, `[rows, out]`.

    x: `[rows, in]`, at most MAX_ROWS, in 16 bits. weight: `[out, in]` in x's dtype, contiguous. compile_only: compile
    the kernel, in parallel within `launch_triton.compiling`, and compute nothing. Launches must follow each other on
    one stream: they share counters.
    """
    tokens, d_in = x.shape
    if tokens > MAX_ROWS:
        raise ValueError(f"x has {tokens} rows; this GEMM takes at most {MAX_ROWS}")
    if x.stride(1) != 1 or not weight.is_contiguous():
        raise ValueError("rows of x and the whole weight must be contiguous")
    y = torch.empty(tokens, len(weight), dtype=x.dtype, device=x.device)
    constants = SplitConstants(d_in, len(weight), bias is not None, dependent_launch.begins_early(x.device))
    if constants.blocks > _MOST_BLOCKS:
        raise ValueError(f"a weight of {len(weight)} rows has more than {_MOST_BLOCKS} blocks of columns")
    if not tokens:
        return y
    size = constants.blocks * constants.parts * constants.block_t * constants.block_n
    partial = torch.empty(size, dtype=torch.float32, device=x.device)
    tensors = y, x, weight, x if bias is None else bias, partial, _arrived(x.device)
    launch, strides = _launcher(constants), (x.stride(0),)
    if compile_only:
        launch.compile(tensors, (tokens,), strides)
    else:
        launch((constants.blocks, constants.parts, 1), tensors, (tokens,), strides)
    return y


@cache
def _arrived(device: torch.device) -> torch.Tensor:
    """Programs that have written their parts, by block of columns: 0 between launches."""
    return torch.zeros(_MOST_BLOCKS, dtype=torch.int32, device=device)


@cache
def _launcher(constants: SplitConstants) -> KernelLauncher:
    options = {**split_options(constants), **dependent_launch.options(constants.pdl)}
    return KernelLauncher(multiply_parts, {"C": constants, **options})


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportGeneralTypeIssues=false
