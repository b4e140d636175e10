"""Product of few rows with a weight on a GPU, bound by reading the weight once: one Triton launch.

    y[t] = x[t] @ Wᵀ (+ bias)        for up to MAX_ROWS rows t, summed in float32

Each warp of a program sums a part of the inputs (split K) for all of the program's columns; the program adds the parts
in a fixed order. So nothing goes through memory, and there is no second launch and no atomic addition. The parts and
their order depend only on the weight's shape, and a tile always has MAX_ROWS rows, padded with zeros: a row's bits are
the same alone, among others, and at any index.

Import this module lazily: it needs triton.
"""

# A kernel is Triton's language in Python's syntax: its arguments and loops are not what type checkers take them for.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
import triton.language.extra.cuda as cuda

from . import dependent_launch
from .small_gemm_schedule import MAX_ROWS, gemm_constants, gemm_options, gemm_schedule

#: Elements of 16 bits in a cache line.
_LINE = tl.constexpr(64)


@triton.jit
def _prefetch(pointers):
    """Have the cache lines at these addresses fetched into the second-level cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
    )  # fmt: skip


@triton.jit
def _load_x(x, residual, at, residual_at, mask, ADD: tl.constexpr):
    """Load inputs; with ADD, add the residual's and round, in their dtype."""
    value = tl.load(x + at, mask=mask, other=0.0)
    if ADD:
        before = tl.load(residual + residual_at, mask=mask, other=0.0)
        value = (value.to(tl.float32) + before.to(tl.float32)).to(value.dtype)
    return value


@triton.jit
def _sum_parts(total, bias, column, own, dtype: tl.constexpr, BIAS: tl.constexpr):
    """The parts `[4, rows, columns]` added up, (0 + 1) + (2 + 3) however threads hold them, with the bias, rounded."""
    rows: tl.constexpr = total.shape[1]
    columns: tl.constexpr = total.shape[2]
    even, odd = tl.split(tl.reshape(tl.permute(total, (1, 2, 0)), [rows, columns, 2, 2]))
    first, second = tl.split(even + odd)
    value = first + second
    if BIAS:
        value += tl.load(bias + column, mask=own, other=0.0).to(tl.float32)[None, :]
    return value.to(dtype)


@triton.jit(do_not_specialize=["tokens"])
def multiply_rows(
    y, x, weight, bias, norm, residual, stream, normed, eps, tokens, y_stride, x_stride, residual_stride,
    D_IN: tl.constexpr, D_OUT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    SPLITS: tl.constexpr, STAGES: tl.constexpr, BIAS: tl.constexpr, SILU: tl.constexpr, NORM: tl.constexpr,
    ADD: tl.constexpr, KEEP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """y[t, n] = Σ_k v[t, k] · weight[n, k] + bias[n], where v is x, with NORM its RMSNorm times `norm`; of x + residual
    with ADD, which goes to `stream`. With KEEP v goes to `normed`. With SILU y = silu(gate) · up of the products with
    weight[n] and weight[D_OUT + n], each rounded first, as `silu_and_mul_rows` rounds.

    Grid (blocks of D_OUT,). y: [tokens, D_OUT], x, residual: [tokens, D_IN], rows …_stride apart; stream, normed:
    [tokens, D_IN], contiguous. weight: [D_OUT or 2 · D_OUT, D_IN], contiguous; norm: [D_IN].

    With PDL the first weights are fetched into the second-level cache before the launch before this one has ended.
    """
    if PDL:
        cuda.gdc_launch_dependents()
    PERIOD: tl.constexpr = SPLITS * BLOCK_K
    block = tl.program_id(0)
    dtype = y.dtype.element_ty
    column = block * BLOCK_N + tl.arange(0, BLOCK_N)
    own_column = column < D_OUT
    token = tl.arange(0, BLOCK_T)
    own_token = token < tokens
    k = tl.arange(0, SPLITS)[:, None] * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    weights = weight + column.to(tl.int64)[None, :, None] * D_IN
    if PDL:
        lines = tl.arange(0, PERIOD // _LINE)[None, :] * _LINE
        rows = weight + tl.minimum(column, D_OUT - 1).to(tl.int64)[:, None] * D_IN
        for step in tl.static_range(0, min(STAGES * PERIOD, D_IN // _LINE * _LINE), PERIOD):
            place = tl.minimum(step + lines, D_IN - 1)
            _prefetch(rows + place)
            if SILU:
                _prefetch(rows + place + D_OUT * D_IN)
        cuda.gdc_wait()
    x_row = token.to(tl.int64)[None, :, None] * x_stride
    residual_row = token.to(tl.int64)[None, :, None] * residual_stride
    own_row = own_token[None, :, None]
    told = (own_token & (block + 0 * token == 0))[None, :, None]  # by one program, which all would say the same
    row = token.to(tl.int64)[None, :, None] * D_IN
    if NORM:
        squares = tl.zeros([SPLITS, BLOCK_T, BLOCK_K], dtype=tl.float32)
        for step in tl.range(0, D_IN, PERIOD, num_stages=1):
            at = (step + k)[:, None, :]
            mask = own_row & (at < D_IN)
            value = _load_x(x, residual, x_row + at, residual_row + at, mask, ADD)
            if ADD:
                tl.store(stream + row + at, value, mask=told & (at < D_IN))
            wide = value.to(tl.float32)
            squares += wide * wide
        scale = tl.rsqrt(tl.sum(tl.sum(squares, axis=2), axis=0) / D_IN + eps)[None, :, None]
    total = tl.zeros([SPLITS, BLOCK_T, BLOCK_N], dtype=tl.float32)
    if SILU:
        total_up = tl.zeros([SPLITS, BLOCK_T, BLOCK_N], dtype=tl.float32)
    for step in tl.range(0, D_IN, PERIOD, num_stages=STAGES):
        at = (step + k)[:, None, :]
        inside = at < D_IN
        w_mask = own_column[None, :, None] & inside
        w = tl.load(weights + at, mask=w_mask, other=0.0)
        value = _load_x(x, residual, x_row + at, residual_row + at, own_row & inside, ADD)
        if NORM:
            factor = tl.load(norm + at, mask=inside, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) * scale).to(dtype).to(tl.float32)
            value = (factor * value).to(dtype)
            if KEEP:
                tl.store(normed + row + at, value, mask=told & inside)
        total = tl.dot(value, tl.permute(w, (0, 2, 1)), total, input_precision="ieee")
        if SILU:
            w = tl.load(weights + D_OUT * D_IN + at, mask=w_mask, other=0.0)
            total_up = tl.dot(value, tl.permute(w, (0, 2, 1)), total_up, input_precision="ieee")
    out = _sum_parts(total, bias, column, own_column, dtype, BIAS)
    if SILU:
        up = _sum_parts(total_up, bias + D_OUT, column, own_column, dtype, BIAS).to(tl.float32)
        gate = out.to(tl.float32)
        silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
        out = (silu * up).to(dtype)
    place = y + token.to(tl.int64)[:, None] * y_stride + column[None, :]
    tl.store(place, out, mask=own_token[:, None] & own_column[None, :])


def multiply(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, silu: bool = False
) -> torch.Tensor:
    """`x @ weightᵀ + bias`, `[rows, out]`; with `silu`, `silu(gate) · up` of its halves, `[rows, out / 2]`.

    x: `[rows, in]`, at most MAX_ROWS. weight: `[out, in]`, contiguous.
    """
    return _launch(x, None, None, 0.0, weight, bias, silu=silu, keep=False)[2]


def add_norm_multiply(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = False,
    keep: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """As `multiply`, of the RMSNorm of residual + x, or of x where there is no residual.

    Returns the normed rows, if they are to be kept, the sum, and the product; x and the residual stay as they are.
    """
    return _launch(x, residual, norm, eps, weight, bias, silu=silu, keep=keep)


def compile_variant(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    norm: torch.Tensor | None,
    residual: torch.Tensor | None,
    *,
    silu: bool,
    keep: bool,
) -> None:
    """Compile what `multiply`, or with a norm `add_norm_multiply`, launches for such arguments; on other threads within
    `launch_triton.compiling`.
    """
    _launch(x, residual, norm, 0.0, weight, bias, silu=silu, keep=keep, compile_only=True)


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: torch.Tensor | None,
    eps: float,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    *,
    silu: bool,
    keep: bool,
    compile_only: bool = False,
) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    tokens, d_in = x.shape
    d_out = len(weight) // 2 if silu else len(weight)
    if tokens > MAX_ROWS:
        raise ValueError(f"{tokens} rows; a product of few rows has at most {MAX_ROWS}")
    if x.stride(1) != 1 or not weight.is_contiguous() or (residual is not None and residual.stride(1) != 1):
        raise ValueError("rows of x and of the residual are contiguous, the weight is as a whole")
    y = torch.empty(tokens, d_out, dtype=x.dtype, device=x.device)
    stream = x if residual is None else torch.empty(tokens, d_in, dtype=x.dtype, device=x.device)
    normed = torch.empty(tokens, d_in, dtype=x.dtype, device=x.device) if keep else None
    if not tokens:
        return normed, stream, y
    schedule = gemm_schedule(len(weight))
    constants = gemm_constants(
        schedule, d_in, d_out, bias=bias is not None, silu=silu, norm=norm is not None, add=residual is not None,
        keep=keep,
    )  # fmt: skip
    early = {"PDL": 1, **dependent_launch.OPTIONS} if dependent_launch.begins_early(x.device) else {}
    before = x if residual is None else residual
    grid = (schedule.blocks(d_out, silu=silu),)
    launch = partial(multiply_rows.warmup, grid=grid) if compile_only else multiply_rows[grid]
    launch(
        y, x, weight, weight if bias is None else bias, weight if norm is None else norm, before, stream,
        stream if normed is None else normed, eps, tokens, y.stride(0), x.stride(0), before.stride(0),
        **constants | gemm_options(schedule) | early,
    )  # fmt: skip
    return normed, stream, y
