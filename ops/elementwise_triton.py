"""Elementwise parts of a decoder layer on a GPU, each in one pass over its values.

They round sums, normalised values and products to the model's dtype exactly where the PyTorch code of `elementwise`
does. Import this module lazily: it needs triton.
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

from . import dependent_launch, float8_kv
from .elementwise_schedule import (
    SILU_BLOCK,
    SiluConstants,
    norm_constants,
    norm_options,
    rotary_blocks,
    rotary_constants,
    rotary_options,
    silu_options,
)
from .launch_triton import KernelLauncher
from .rotation import HeadNorms, KvSlots, Rotation


@triton.jit
def rms_norm_rows(
    y,
    x,
    residual,
    norm,
    eps,
    x_stride,
    y_stride,
    residual_stride,
    C: tl.constexpr,
):
    """y[t] = x[t] / sqrt(mean(x[t]²) + eps) · norm; with C.add, residual[t] += x[t] first and is normalised instead.

    Grid (tokens,). y, x, residual: [tokens, width] with the given row strides; norm: [width]. C: `NormConstants`.
    """
    WIDTH: tl.constexpr = C.width
    BLOCK: tl.constexpr = C.block
    row = tl.program_id(0).to(tl.int64)
    dtype = y.dtype.element_ty
    column = tl.arange(0, BLOCK)
    own = column < WIDTH
    factor = tl.load(norm + column, mask=own, other=0.0)
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    value = tl.load(x + row * x_stride + column, mask=own, other=0.0).to(tl.float32)
    if C.add:
        stream = residual + row * residual_stride + column
        value = (value + tl.load(stream, mask=own, other=0.0).to(tl.float32)).to(dtype)
        tl.store(stream, value, mask=own)
        value = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    value = (value * scale).to(dtype).to(tl.float32)
    tl.store(y + row * y_stride + column, (factor.to(tl.float32) * value).to(dtype), mask=own)


def rms_norm(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as `elementwise.rms_norm`."""
    return _launch_norm(x, None, norm, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as `elementwise.add_rms_norm`."""
    return _launch_norm(x, residual, norm, eps)


def _launch_norm(x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float) -> torch.Tensor:
    tokens, width = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not tokens:
        return y
    stream = x if residual is None else residual
    if x.stride(1) != 1 or stream.stride(1) != 1:
        raise ValueError("rows of x and of the residual must be contiguous")
    launch = _norm(width, residual is not None, dependent_launch.begins_early(x.device))
    launch((tokens, 1, 1), (y, x, stream, norm), (eps,), (x.stride(0), width, stream.stride(0)))
    return y


@cache
def _norm(width: int, add: bool, early: bool) -> KernelLauncher:
    constants = replace(norm_constants(width, add), pdl=early)
    return KernelLauncher(rms_norm_rows, {"C": constants, **norm_options(width), **dependent_launch.options(early)})


@triton.jit
def _normed(low, high, weight, column, own, eps, HEAD_DIM: tl.constexpr, dtype: tl.constexpr):
    """RMSNorm of heads given as two halves, float32 `[heads, half]`."""
    mean = (tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)) / HEAD_DIM
    scale = tl.rsqrt(mean + eps)[:, None]
    for_low = tl.load(weight + column, mask=own, other=0.0).to(tl.float32)[None, :]
    for_high = tl.load(weight + HEAD_DIM // 2 + column, mask=own, other=0.0).to(tl.float32)[None, :]
    low = (for_low * (low * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    high = (for_high * (high * scale).to(dtype).to(tl.float32)).to(dtype).to(tl.float32)
    return low, high


@triton.jit
def _rotated(low, high, cos, sin, dtype: tl.constexpr):
    """Return low · cos - high · sin and high · cos + low · sin."""
    first = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    second = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    return first.to(dtype), second.to(dtype)


class Angles(NamedTuple):
    """Angles of a step's tokens, as one argument: token t's are in row rows[t] of cos and sin, [positions, head_dim],
    whose halves are equal.
    """

    cos: torch.Tensor
    sin: torch.Tensor
    rows: torch.Tensor


class Places(NamedTuple):
    """Where keys and values go, as one argument; see `KvSlots`. Caches in FP8 are given as uint8."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page: torch.Tensor
    offset: torch.Tensor


@triton.jit
def _float8(values):
    """The bits of E4M3 (uint8) nearest to float32 values, ties to even; of values beyond ±448 those of ±448.

    Below 2^-6 all are multiples of 2^-9, which are counted by adding 2^14: float32 has no finer ones there.
    """
    bits = values.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    small = (tl.abs(values) + 16384.0).to(tl.uint32, bitcast=True) - 0x46800000
    large = (bits + 0x7FFFF + ((bits >> 20) & 1) - 0x3C000000) >> 20
    found = tl.where(bits < 0x3C800000, small, tl.minimum(large, 0x7E))
    return (found | sign).to(tl.uint8)


@triton.jit
def rotate_and_write_heads(
    q,
    qkv,
    angles,
    slots,
    q_norm,
    k_norm,
    eps,
    k_inverse,
    v_inverse,
    qkv_stride,
    table_stride,
    page_stride,
    token_stride,
    head_stride,
    C: tl.constexpr,
):
    """Rotate the heads of Q and K, and write K and V into their pages.

    Grid (tokens, blocks of query heads followed by blocks of KV heads).

    q: [tokens, heads, head_dim], contiguous. qkv: [tokens, (heads + 2 · kv_heads) · head_dim]. angles: see `Angles`.
    slots: see `Places`; the caches have the given strides. q_norm, k_norm: [head_dim], read if C.norm. k_inverse,
    v_inverse: what keys and values are multiplied by before they are rounded to FP8, if C.float8. C: `RotaryConstants`.

    A head with a non-finite k or v is written as a key of NaN and a value of 0. Attention kernels mask scores and weigh
    masked values by 0, and 0 · NaN is NaN. With a value of 0 only tokens that attend to this one get NaN (by the key),
    not earlier tokens, which another request may share as its prefix.
    """
    HEADS: tl.constexpr = C.heads
    KV_HEADS: tl.constexpr = C.kv_heads
    HEAD_DIM: tl.constexpr = C.head_dim
    BLOCK_H: tl.constexpr = C.block_h
    BLOCK_D: tl.constexpr = C.block_d
    HALF: tl.constexpr = HEAD_DIM // 2
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    dtype = q.dtype.element_ty
    column = tl.arange(0, BLOCK_D)
    own = column < HALF
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    at = tl.load(angles.rows + token) * table_stride + column
    c = tl.load(angles.cos + at, mask=own, other=0.0).to(tl.float32)[None, :]
    s = tl.load(angles.sin + at, mask=own, other=0.0).to(tl.float32)[None, :]
    source = qkv + token * qkv_stride
    if block < Q_BLOCKS:
        head = block * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < HEADS)[:, None] & own[None, :]
        place = head[:, None] * HEAD_DIM + column[None, :]
        low = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + place + HALF, mask=mask, other=0.0).to(tl.float32)
        if C.norm:
            low, high = _normed(low, high, q_norm, column, own, eps, HEAD_DIM, dtype)
        first, second = _rotated(low, high, c, s, dtype)
        target = q + token * (HEADS * HEAD_DIM) + place
        tl.store(target, first, mask=mask)
        tl.store(target + HALF, second, mask=mask)
    else:
        head = (block - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H)
        mask = (head < KV_HEADS)[:, None] & own[None, :]
        place = (HEADS + head)[:, None] * HEAD_DIM + column[None, :]
        low = tl.load(source + place, mask=mask, other=0.0).to(tl.float32)
        high = tl.load(source + place + HALF, mask=mask, other=0.0).to(tl.float32)
        if C.norm:
            low, high = _normed(low, high, k_norm, column, own, eps, HEAD_DIM, dtype)
        first, second = _rotated(low, high, c, s, dtype)
        v = source + place + KV_HEADS * HEAD_DIM
        spread = (first.to(tl.float32) + second.to(tl.float32)) * 0.0
        spread += tl.load(v, mask=mask, other=0.0).to(tl.float32) * 0.0
        spread += tl.load(v + HALF, mask=mask, other=0.0).to(tl.float32) * 0.0
        trace = tl.sum(spread, axis=1)[:, None]  # 0, or NaN where any element is NaN or infinite
        is_sound = trace == 0.0
        slot = tl.load(slots.page + token) * page_stride + tl.load(slots.offset + token) * token_stride
        slot = slot + head[:, None] * head_stride + column[None, :]
        sound = mask & is_sound
        if C.float8:
            k_first, k_second = _float8(first.to(tl.float32) * k_inverse), _float8(second.to(tl.float32) * k_inverse)
            tl.store(slots.k_cache + slot, tl.where(is_sound, k_first, 0x7F).to(tl.uint8), mask=mask)
            tl.store(slots.k_cache + slot + HALF, tl.where(is_sound, k_second, 0x7F).to(tl.uint8), mask=mask)
            v_first = _float8(tl.load(v, mask=sound, other=0.0).to(tl.float32) * v_inverse)
            tl.store(slots.v_cache + slot, v_first, mask=mask)
            v_second = _float8(tl.load(v + HALF, mask=sound, other=0.0).to(tl.float32) * v_inverse)
            tl.store(slots.v_cache + slot + HALF, v_second, mask=mask)
        else:
            tl.store(slots.k_cache + slot, tl.where(is_sound, first, trace.to(dtype)), mask=mask)
            tl.store(slots.k_cache + slot + HALF, tl.where(is_sound, second, trace.to(dtype)), mask=mask)
            # load v again: kept in registers since the first load, it would spill
            tl.store(slots.v_cache + slot, tl.load(v, mask=sound, other=0.0), mask=mask)
            tl.store(slots.v_cache + slot + HALF, tl.load(v + HALF, mask=sound, other=0.0), mask=mask)


def rotate_and_write(
    qkv: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
    slots: KvSlots,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `elementwise.rotate_and_write`, for a rotation given as a table and its rows. Raises ValueError for
    strides that the kernel does not take.
    """
    k_cache, v_cache, page, offset, scales = slots
    if is_float8 := k_cache.dtype == float8_kv.DTYPE:
        k_cache, v_cache = k_cache.view(torch.uint8), v_cache.view(torch.uint8)
    tokens = len(qkv)
    kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    q = torch.empty(tokens, num_heads, head_dim, dtype=qkv.dtype, device=qkv.device) if out is None else out
    if not tokens:
        return q
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1 or qkv.stride(1) != 1:
        raise ValueError("K and V must have the same strides; rows of qkv and heads of the cache must be contiguous")
    q_norm, k_norm, eps = (qkv, qkv, 0.0) if norms is None else (norms.q, norms.k, norms.eps)
    early = dependent_launch.begins_early(qkv.device)
    launch = _rotary(num_heads, kv_heads, head_dim, norms is not None, early, is_float8)
    launch(
        (tokens, rotary_blocks(num_heads, kv_heads), 1),
        (
            q,
            qkv,
            Angles(rotation.cos, rotation.sin, rotation.rows),
            Places(k_cache, v_cache, page, offset),
            q_norm,
            k_norm,
        ),
        (eps, *map(float8_kv.inverse, scales)) if is_float8 else (eps, 1.0, 1.0),
        (qkv.stride(0), rotation.cos.stride(0), *k_cache.stride()[:3]),
    )
    return q


@cache
def _rotary(num_heads: int, kv_heads: int, head_dim: int, norm: bool, early: bool, float8: bool) -> KernelLauncher:
    constants = replace(rotary_constants(num_heads, kv_heads, head_dim, norm), pdl=early, float8=float8)
    options = {**rotary_options(), **dependent_launch.options(early)}
    return KernelLauncher(rotate_and_write_heads, {"C": constants, **options})


@triton.jit
def silu_and_mul_rows(y, gate_up, gate_up_stride, y_stride, C: tl.constexpr):
    """y[t, i] = silu(gate_up[t, i]) · gate_up[t, ffn + i], with silu rounded to y's dtype as PyTorch rounds it.

    Grid (tokens, blocks of ffn). gate_up: [tokens, 2 · ffn], y: [tokens, ffn], with the given row strides. C:
    `SiluConstants`.
    """
    FFN: tl.constexpr = C.ffn
    BLOCK: tl.constexpr = C.block
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = column < FFN
    place = gate_up + row * gate_up_stride + column
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    gate = tl.load(place, mask=own, other=0.0).to(tl.float32)
    up = tl.load(place + FFN, mask=own, other=0.0).to(tl.float32)
    dtype = y.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(y + row * y_stride + column, (silu * up).to(dtype), mask=own)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The same as `elementwise.silu_and_mul`."""
    tokens, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(tokens, ffn, dtype=gate_up.dtype, device=gate_up.device)
    if not tokens:
        return y
    if gate_up.stride(1) != 1:
        raise ValueError("rows of gate_up must be contiguous")
    launch = _silu(ffn, dependent_launch.begins_early(gate_up.device))
    launch((tokens, -(-ffn // SILU_BLOCK), 1), (y, gate_up), (), (gate_up.stride(0), ffn))
    return y


@cache
def _silu(ffn: int, early: bool) -> KernelLauncher:
    constants = SiluConstants(ffn, pdl=early)
    return KernelLauncher(silu_and_mul_rows, {"C": constants, **silu_options(), **dependent_launch.options(early)})


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
