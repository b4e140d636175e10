"""Elementwise parts of a decoder layer on a GPU, each in one pass over its values.

They round to the model's dtype exactly where the PyTorch code of `elementwise` does. Import lazily: it needs triton.
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
from . import float8_kv
from .elementwise_schedule import (
    GATED_BLOCK,
    GatedConstants,
    Gating,
    HeadNorming,
    LatentConstants,
    RotaryConstants,
    gated_options,
    norm_constants,
    norm_options,
    rotary_blocks,
    rotary_options,
)
from .gates_triton import gated
from .rotation import HeadNorms, KvSlots, NewLatents, Rotation

_WHOLE = tl.constexpr(HeadNorming.WHOLE.value)
_NO_NORM = tl.constexpr(HeadNorming.NONE.value)

#: Elements whose squares are added at once.
_SQUARES = tl.constexpr(1024)


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
    """y[t] = x[t] / sqrt(mean(x[t]²) + eps) · norm; with C.add, residual[t] += x[t] first and is normalised instead;
    with C.centered, less its mean.

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
    if C.centered:
        value = tl.where(own, value - tl.sum(value, axis=0) / WIDTH, 0.0)
    value = value * tl.rsqrt(tl.sum(value * value, axis=0) / WIDTH + eps)
    if not C.wide:
        value = value.to(dtype).to(tl.float32)
    tl.store(y + row * y_stride + column, (factor.to(tl.float32) * value).to(dtype), mask=own)


def rms_norm(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as `elementwise.rms_norm`."""
    return _launch_norm(x, None, norm, eps)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as `elementwise.add_rms_norm`."""
    return _launch_norm(x, residual, norm, eps)


def layer_norm(x: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as `elementwise.layer_norm`."""
    return _launch_norm(x, None, norm, eps, centered=True)


def add_layer_norm(x: torch.Tensor, residual: torch.Tensor, norm: torch.Tensor, eps: float) -> torch.Tensor:
    """The same as `elementwise.add_layer_norm`."""
    return _launch_norm(x, residual, norm, eps, centered=True)


def _launch_norm(
    x: torch.Tensor, residual: torch.Tensor | None, norm: torch.Tensor, eps: float, *, centered: bool = False
) -> torch.Tensor:
    tokens, width = x.shape
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    if not tokens:
        return y
    stream = x if residual is None else residual
    if x.stride(1) != 1 or stream.stride(1) != 1:
        raise ValueError("rows of x and of the residual must be contiguous")
    early, wide = dependent_launch.begins_early(x.device), norm.dtype != x.dtype
    launch = _norm(width, residual is not None, early, centered=centered, wide=wide)
    launch((tokens, 1, 1), (y, x, stream, norm), (eps,), (x.stride(0), width, stream.stride(0)))
    return y


@cache
def _norm(width: int, add: bool, early: bool, *, centered: bool, wide: bool) -> KernelLauncher:
    constants = replace(norm_constants(width, add, centered=centered, wide=wide), pdl=early)
    return KernelLauncher(rms_norm_rows, {"C": constants, **norm_options(width), **dependent_launch.options(early)})


@triton.jit
def _weighed(values, scale, weight, mask, dtype: tl.constexpr, WIDE: tl.constexpr):
    """values · scale · weight, rounded as `elementwise.rms_norm` rounds it. weight: addresses."""
    factor = tl.load(weight, mask=mask, other=0.0).to(tl.float32)
    values = values * scale
    if not WIDE:
        values = values.to(dtype).to(tl.float32)
    return (factor * values).to(dtype).to(tl.float32)


@triton.jit
def _sum_of_squares(start, WIDTH: tl.constexpr):
    total = tl.zeros((_SQUARES,), dtype=tl.float32)
    for step in tl.range(0, WIDTH, _SQUARES):
        at = step + tl.arange(0, _SQUARES)
        value = tl.load(start + at, mask=at < WIDTH, other=0.0).to(tl.float32)
        total += value * value
    return tl.sum(total, axis=0)


@triton.jit
def _turned(start, norm, cos, sin, at, own, eps, HEADS: tl.constexpr, dtype: tl.constexpr, C: tl.constexpr):
    """Heads of one kind, normalised and rotated: elements that rotate with others, those others, and the rest.

    start: address of the token's first head. at: offsets of a block of heads from it, `[heads, 1]`. own: which of these
    heads exist. cos, sin: `[1, pairs]` float32.
    """
    HEAD_DIM: tl.constexpr = C.head_dim
    low_at, high_at, rest_at = _elements(C)
    paired = own & (tl.arange(0, C.block_d) < C.half)[None, :]
    resting = own & (rest_at < HEAD_DIM)
    low = tl.load(start + at + low_at, mask=paired, other=0.0).to(tl.float32)
    high = tl.load(start + at + high_at, mask=paired, other=0.0).to(tl.float32)
    rest = tl.load(start + at + rest_at, mask=resting, other=0.0).to(tl.float32) if C.rest else low
    if C.norm != _NO_NORM:
        weight = norm
        if C.norm == _WHOLE:
            scale = tl.rsqrt(_sum_of_squares(start, HEADS * HEAD_DIM) / (HEADS * HEAD_DIM) + eps)
            weight = norm + at
        else:
            mean = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
            if C.rest:
                mean += tl.sum(rest * rest, axis=1)
            scale = tl.rsqrt(mean / HEAD_DIM + eps)[:, None]
        low = _weighed(low, scale, weight + low_at, paired, dtype, C.wide)
        high = _weighed(high, scale, weight + high_at, paired, dtype, C.wide)
        if C.rest:
            rest = _weighed(rest, scale, weight + rest_at, resting, dtype, C.wide)
    if C.dim:
        first, second = _rotated(low, high, cos, sin, dtype)
    else:
        first, second = low.to(dtype), high.to(dtype)
    return first, second, rest.to(dtype)


@triton.jit
def _elements(C: tl.constexpr):
    """Places in a head of the elements that `_turned` returns, `[1, …]`."""
    column = tl.arange(0, C.block_d)[None, :]
    rest = 2 * C.half + tl.arange(0, C.block_r)[None, :]
    if C.interleaved:
        return 2 * column, 2 * column + 1, rest
    return column, column + C.half, rest


@triton.jit
def _rotated(low, high, cos, sin, dtype: tl.constexpr):
    """Return low · cos - high · sin and high · cos + low · sin."""
    first = (low * cos).to(dtype).to(tl.float32) - (high * sin).to(dtype).to(tl.float32)
    second = (high * cos).to(dtype).to(tl.float32) + (low * sin).to(dtype).to(tl.float32)
    return first.to(dtype), second.to(dtype)


class Angles(NamedTuple):
    """Angles of a step's tokens, as one argument: token t's are in row rows[t] of cos and sin, [positions, dim]; those
    of elements that rotate together are equal.
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
    slots: see `Places`; the caches have the given strides. q_norm, k_norm: see `HeadNorms`. k_inverse, v_inverse: what
    keys and values are multiplied by before they are rounded to FP8, if C.float8. C: `RotaryConstants`.

    A head with a non-finite k or v is written as a key of NaN and a value of 0. Attention kernels mask scores and weigh
    masked values by 0, and 0 · NaN is NaN. With a value of 0 only tokens that attend to this one get NaN (by the key),
    not earlier tokens, which another request may share as its prefix.
    """
    HEADS: tl.constexpr = C.heads
    KV_HEADS: tl.constexpr = C.kv_heads
    HEAD_DIM: tl.constexpr = C.head_dim
    BLOCK_H: tl.constexpr = C.block_h
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    Q_BLOCKS: tl.constexpr = (HEADS + BLOCK_H - 1) // BLOCK_H
    dtype = q.dtype.element_ty
    low_at, high_at, rest_at = _elements(C)
    own = (tl.arange(0, C.block_d) < C.half)[None, :]
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    cos, sin = 1.0, 0.0
    if C.dim:
        angle = tl.load(angles.rows + token) * table_stride + low_at
        cos = tl.load(angles.cos + angle, mask=own, other=0.0).to(tl.float32)
        sin = tl.load(angles.sin + angle, mask=own, other=0.0).to(tl.float32)
    source = qkv + token * qkv_stride
    if block < Q_BLOCKS:
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        given, at = head < HEADS, head * HEAD_DIM
        first, second, rest = _turned(source, q_norm, cos, sin, at, given, eps, HEADS, dtype, C)
        target = q + token * (HEADS * HEAD_DIM) + at
        tl.store(target + low_at, first, mask=given & own)
        tl.store(target + high_at, second, mask=given & own)
        if C.rest:
            tl.store(target + rest_at, rest, mask=given & (rest_at < HEAD_DIM))
    else:
        head = ((block - Q_BLOCKS) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        given, at = head < KV_HEADS, head * HEAD_DIM
        mask, resting = given & own, given & (rest_at < HEAD_DIM)
        keys = source + HEADS * HEAD_DIM
        first, second, rest = _turned(keys, k_norm, cos, sin, at, given, eps, KV_HEADS, dtype, C)
        v = keys + KV_HEADS * HEAD_DIM + at
        spread = (first.to(tl.float32) + second.to(tl.float32)) * 0.0
        spread += tl.load(v + low_at, mask=mask, other=0.0).to(tl.float32) * 0.0
        spread += tl.load(v + high_at, mask=mask, other=0.0).to(tl.float32) * 0.0
        trace = tl.sum(spread, axis=1)[:, None]  # 0, or NaN where any element is NaN or infinite
        if C.rest:
            spread = (rest.to(tl.float32) + tl.load(v + rest_at, mask=resting, other=0.0).to(tl.float32)) * 0.0
            trace += tl.sum(spread, axis=1)[:, None]
        slot = tl.load(slots.page + token) * page_stride + tl.load(slots.offset + token) * token_stride
        slot = slot + head * head_stride
        _write(slots, slot + low_at, first, v + low_at, mask, trace, k_inverse, v_inverse, C.float8)
        _write(slots, slot + high_at, second, v + high_at, mask, trace, k_inverse, v_inverse, C.float8)
        if C.rest:
            _write(slots, slot + rest_at, rest, v + rest_at, resting, trace, k_inverse, v_inverse, C.float8)


@triton.jit
def _write(slots, slot, key, v, mask, trace, k_inverse, v_inverse, FLOAT8: tl.constexpr):
    """Write some elements of keys, and those of values from v. trace: 0 of heads that are sound."""
    is_sound = trace == 0.0
    value = tl.load(v, mask=mask & is_sound, other=0.0)  # once more: kept in registers since then, it would spill
    if FLOAT8:
        key = _float8(key.to(tl.float32) * k_inverse)
        tl.store(slots.k_cache + slot, tl.where(is_sound, key, 0x7F).to(tl.uint8), mask=mask)
        tl.store(slots.v_cache + slot, _float8(value.to(tl.float32) * v_inverse), mask=mask)
    else:
        tl.store(slots.k_cache + slot, tl.where(is_sound, key, trace.to(key.dtype)), mask=mask)
        tl.store(slots.v_cache + slot, value, mask=mask)


def rotate_and_write(
    qkv: torch.Tensor,
    rotation: Rotation | None,
    norms: HeadNorms | None,
    slots: KvSlots,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same as `elementwise.rotate_and_write`, for a rotation given as a table and its rows, and norms of a rank's
    own heads. Raises ValueError for strides that the kernel does not take.
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
    angles, stride = Angles(qkv, qkv, page), 0  # not read
    if rotation is not None:
        assert rotation.rows is not None, "a GPU's rotation is a table"
        angles, stride = Angles(rotation.cos, rotation.sin, rotation.rows), rotation.cos.stride(0)
    norming = HeadNorming.NONE
    if norms is not None:
        norming = HeadNorming.EACH if norms.q.numel() == head_dim else HeadNorming.WHOLE
    launch = _rotary(
        RotaryConstants(
            num_heads,
            kv_heads,
            head_dim,
            0 if rotation is None else rotation.cos.shape[-1],
            interleaved=rotation is not None and rotation.interleaved,
            norm=norming,
            wide=q_norm.dtype != qkv.dtype,
            pdl=dependent_launch.begins_early(qkv.device),
            float8=is_float8,
        )
    )
    launch(
        (tokens, rotary_blocks(num_heads, kv_heads), 1),
        (q, qkv, angles, Places(k_cache, v_cache, page, offset), q_norm, k_norm),
        (eps, *map(float8_kv.inverse, scales)) if is_float8 else (eps, 1.0, 1.0),
        (qkv.stride(0), stride, *k_cache.stride()[:3]),
    )
    return q


@cache
def _rotary(constants: RotaryConstants) -> KernelLauncher:
    options = {**rotary_options(interleaved=constants.interleaved), **dependent_launch.options(constants.pdl)}
    return KernelLauncher(rotate_and_write_heads, {"C": constants, **options})


@triton.jit
def gate_and_mul_rows(y, gate_up, gate_up_stride, y_stride, C: tl.constexpr):
    """y[t, i] = f(gate_up[t, i]) · gate_up[t, ffn + i], see `gated`.

    Grid (tokens, blocks of ffn). gate_up: [tokens, 2 · ffn], y: [tokens, ffn], with the given row strides. C:
    `GatedConstants`.
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
    tl.store(y + row * y_stride + column, gated(gate, up, y.dtype.element_ty, C), mask=own)


def gate_and_mul(gate_up: torch.Tensor, gating: Gating, alpha: float = 0.0, limit: float = 0.0) -> torch.Tensor:
    """The same as `elementwise.silu_and_mul`, or the function of another activation."""
    tokens, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(tokens, ffn, dtype=gate_up.dtype, device=gate_up.device)
    if not tokens:
        return y
    if gate_up.stride(1) != 1:
        raise ValueError("rows of gate_up must be contiguous")
    launch = _gated(GatedConstants(ffn, gating, alpha, limit, pdl=dependent_launch.begins_early(gate_up.device)))
    launch((tokens, -(-ffn // GATED_BLOCK), 1), (y, gate_up), (), (gate_up.stride(0), ffn))
    return y


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The same as `elementwise.silu_and_mul`."""
    return gate_and_mul(gate_up, Gating.SILU)


@cache
def _gated(constants: GatedConstants) -> KernelLauncher:
    options = {**gated_options(), **dependent_launch.options(constants.pdl)}
    return KernelLauncher(gate_and_mul_rows, {"C": constants, **options})


@triton.jit
def rotate_and_write_latents(
    q,
    given_q,
    kept,
    angles,
    slots,
    norm,
    eps,
    q_stride,
    kept_stride,
    table_stride,
    page_stride,
    token_stride,
    C: tl.constexpr,
):
    """Rotate the last elements of queries and the tokens' key, normalise latents, and write these and the key.

    Grid (tokens, blocks of query heads, and one for the latent).

    q: [tokens, heads, key_dim + head_dim], contiguous. given_q: as many, with the given row stride. kept: [tokens,
    kv_rank + head_dim], likewise: a latent and a key. norm: [kv_rank], if C.has_norm. angles: see `Angles`. slots: see
    `Places`, of one cache with the given strides. C: `LatentConstants`.
    """
    HEADS: tl.constexpr = C.heads
    KEY_DIM: tl.constexpr = C.key_dim
    KV_RANK: tl.constexpr = C.kv_rank
    BLOCK_H: tl.constexpr = C.block_h
    WIDTH: tl.constexpr = KEY_DIM + C.head_dim
    token, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    dtype = q.dtype.element_ty
    low_at, high_at, rest_at = _elements(C)
    own = (tl.arange(0, C.block_d) < C.half)[None, :]
    if C.pdl:
        cuda.gdc_launch_dependents()
        cuda.gdc_wait()
    cos, sin = 1.0, 0.0
    if C.dim:
        angle = tl.load(angles.rows + token) * table_stride + low_at
        cos = tl.load(angles.cos + angle, mask=own, other=0.0).to(tl.float32)
        sin = tl.load(angles.sin + angle, mask=own, other=0.0).to(tl.float32)
    if block * BLOCK_H < HEADS:
        head = (block * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
        there, at = head < HEADS, head * WIDTH
        source, target = given_q + token * q_stride, q + token * (HEADS * WIDTH) + at
        if KEY_DIM:
            before = tl.arange(0, C.block_key)[None, :]
            in_head = there & (before < KEY_DIM)
            tl.store(target + before, tl.load(source + at + before, mask=in_head, other=0.0), mask=in_head)
        first, second, rest = _turned(source, norm, cos, sin, at + KEY_DIM, there, eps, HEADS, dtype, C)
        target += KEY_DIM
        tl.store(target + low_at, first, mask=there & own)
        tl.store(target + high_at, second, mask=there & own)
        if C.rest:
            tl.store(target + rest_at, rest, mask=there & (rest_at < C.head_dim))
    else:
        column = tl.arange(0, C.block_rank)
        mask = column < KV_RANK
        source = kept + token * kept_stride
        latent = tl.load(source + column, mask=mask, other=0.0)
        if C.has_norm:
            wide = latent.to(tl.float32)
            scale = tl.rsqrt(tl.sum(wide * wide, axis=0) / KV_RANK + eps)
            latent = _weighed(wide, scale, norm + column, mask, dtype, C.wide).to(dtype)
        slot = tl.load(slots.page + token) * page_stride + tl.load(slots.offset + token) * token_stride
        tl.store(slots.k_cache + slot + column, latent, mask=mask)
        only = tl.arange(0, 1)[:, None]
        key, other, more = _turned(source + KV_RANK, norm, cos, sin, only, only < 1, eps, 1, dtype, C)
        of_key = slots.k_cache + slot + KV_RANK + only
        tl.store(of_key + low_at, key, mask=own)
        tl.store(of_key + high_at, other, mask=own)
        if C.rest:
            tl.store(of_key + rest_at, more, mask=rest_at < C.head_dim)


def write_latents(
    q: torch.Tensor, new: NewLatents, rotation: Rotation | None, slots: KvSlots, out: torch.Tensor | None = None
) -> torch.Tensor:
    """The same as `elementwise.write_latents`, for a rotation given as a table and its rows. Raises ValueError for
    strides that the kernel does not take.
    """
    cache, _, page, offset, _ = slots
    kept, kv_rank, norm, eps = new
    tokens, num_heads, width = q.shape
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device) if out is None else out
    if not tokens:
        return out
    if q.stride(2) != 1 or q.stride(1) != width or kept.stride(1) != 1 or cache.stride(3) != 1:
        raise ValueError("queries of a token, a latent and its key, and the cache's must be contiguous")
    angles, stride = Angles(q, q, page), 0  # not read
    if rotation is not None:
        assert rotation.rows is not None, "a GPU's rotation is a table"
        angles, stride = Angles(rotation.cos, rotation.sin, rotation.rows), rotation.cos.stride(0)
    head_dim = kept.shape[1] - kv_rank
    launch = _latents(
        LatentConstants(
            num_heads,
            1,
            head_dim,
            0 if rotation is None else rotation.cos.shape[-1],
            interleaved=rotation is not None and rotation.interleaved,
            wide=norm is not None and norm.dtype != q.dtype,
            pdl=dependent_launch.begins_early(q.device),
            key_dim=width - head_dim,
            kv_rank=kv_rank,
            has_norm=norm is not None,
        )
    )
    launch(
        (tokens, rotary_blocks(num_heads, 1), 1),
        (out, q, kept, angles, Places(cache, cache, page, offset), q if norm is None else norm),
        (eps,),
        (q.stride(0), kept.stride(0), stride, *cache.stride()[:2]),
    )
    return out


@cache
def _latents(constants: LatentConstants) -> KernelLauncher:
    options = {**rotary_options(), **dependent_launch.options(constants.pdl)}
    return KernelLauncher(rotate_and_write_latents, {"C": constants, **options})


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false
# pyright: reportAttributeAccessIssue=false
