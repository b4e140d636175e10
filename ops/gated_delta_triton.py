"""Gated DeltaNet on a GPU: a decode step in one launch, and the delta rule of a prompt in one.

The arithmetic is that of `gated_delta`, in float32. Import this module lazily: it needs triton.

Tests: tests/ops/test_gated_delta_interpreted.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from .gated_delta_schedule import SCAN_COLUMNS, scan_constants, scan_options, step_constants, step_options
from .launch_triton import KernelLauncher


@triton.jit
def _convolved(mixed, conv_in, conv_out, taps, channel, own, first, CHANNELS: tl.constexpr, CONV: tl.constexpr):
    """silu of the convolution of some channels of one token; the state of those from `first` on is stored.

    mixed: the token's row; conv_in, conv_out: `[CONV - 1, CHANNELS]` of the sequence.
    """
    newest = tl.load(mixed + channel, mask=own, other=0.0).to(tl.float32)
    total = newest * tl.load(taps + (CONV - 1) * CHANNELS + channel, mask=own, other=0.0)
    for tap in tl.static_range(CONV - 1):
        x = tl.load(conv_in + tap * CHANNELS + channel, mask=own, other=0.0)
        total += x * tl.load(taps + tap * CHANNELS + channel, mask=own, other=0.0)
        if tap > 0:
            tl.store(conv_out + (tap - 1) * CHANNELS + channel, x, mask=own & (channel >= first))
    tl.store(conv_out + (CONV - 2) * CHANNELS + channel, newest, mask=own & (channel >= first))
    return total * tl.sigmoid(total)


@triton.jit
def step_heads(
    out,
    mixed,
    conv_in,
    conv_out,
    recurrent,
    taps,
    dt_bias,
    a_log,
    norm,
    eps,
    mixed_stride,
    out_stride,
    C: tl.constexpr,
):
    """One token of each sequence, from the input projection's rows to the output projection's.

    Grid (sequences, v_heads). mixed, out: rows with the given strides. conv_in, conv_out: `[sequences, conv - 1,
    channels]`, apart. recurrent: `[sequences, v_heads, k_dim, v_dim]`, updated in place. C: `DeltaConstants`.
    """
    K_HEADS: tl.constexpr = C.k_heads
    V_HEADS: tl.constexpr = C.v_heads
    K_DIM: tl.constexpr = C.k_dim
    V_DIM: tl.constexpr = C.v_dim
    CONV: tl.constexpr = C.conv
    BLOCK_K: tl.constexpr = C.block_k
    BLOCK_V: tl.constexpr = C.block_v
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    CHANNELS: tl.constexpr = 2 * K_HEADS * K_DIM + V_HEADS * V_DIM
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    i, j = tl.arange(0, BLOCK_K), tl.arange(0, BLOCK_V)
    own_k, own_v = i < K_DIM, j < V_DIM
    x = mixed + row * mixed_stride
    before, after = conv_in + row * (CONV - 1) * CHANNELS, conv_out + row * (CONV - 1) * CHANNELS
    q_channel = head // GROUP * K_DIM + i
    first = tl.where(head % GROUP == 0, 0, CHANNELS)  # one of the heads that share q and k stores their state
    q = _convolved(x, before, after, taps, q_channel, own_k, first, CHANNELS, CONV)
    k = _convolved(x, before, after, taps, K_HEADS * K_DIM + q_channel, own_k, first, CHANNELS, CONV)
    v = _convolved(x, before, after, taps, 2 * K_HEADS * K_DIM + head * V_DIM + j, own_v, 0, CHANNELS, CONV)
    q = tl.where(own_k, q, 0.0)
    k = tl.where(own_k, k, 0.0)
    q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (K_DIM**-0.5))
    k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
    b = tl.load(x + CHANNELS + V_HEADS * V_DIM + head).to(tl.float32)
    a = tl.load(x + CHANNELS + V_HEADS * V_DIM + V_HEADS + head).to(tl.float32) + tl.load(dt_bias + head)
    softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
    decay = tl.exp(-tl.exp(tl.load(a_log + head)) * softplus)
    place = recurrent + (row * V_HEADS + head) * K_DIM * V_DIM + i[:, None] * V_DIM + j[None, :]
    own = own_k[:, None] & own_v[None, :]
    state = tl.load(place, mask=own, other=0.0) * decay
    delta = (v - tl.sum(state * k[:, None], axis=0)) * tl.sigmoid(b)
    state += k[:, None] * delta[None, :]
    tl.store(place, state, mask=own)
    y = tl.where(own_v, tl.sum(state * q[:, None], axis=0), 0.0)
    z = tl.load(x + CHANNELS + head * V_DIM + j, mask=own_v, other=0.0).to(tl.float32)
    y = y * tl.rsqrt(tl.sum(y * y, axis=0) / V_DIM + eps) * tl.load(norm + j, mask=own_v, other=0.0)
    tl.store(out + row * out_stride + head * V_DIM + j, (y * z * tl.sigmoid(z)).to(out.dtype.element_ty), mask=own_v)


def step(
    mixed: torch.Tensor,
    taps: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    norm: torch.Tensor,
    conv: torch.Tensor,
    recurrent: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """`gated_delta` of sequences of one token each; conv and recurrent are updated in place."""
    count, v_heads, k_dim, v_dim = recurrent.shape
    channels = conv.shape[2]
    if mixed.stride(1) != 1:
        raise ValueError("rows of the input projection must be contiguous")
    out = mixed.new_empty(count, v_heads * v_dim)
    after = torch.empty_like(conv)
    k_heads = (channels - v_heads * v_dim) // (2 * k_dim)
    launch = _step(k_heads, v_heads, k_dim, v_dim, len(taps))
    tensors = (out, mixed, conv, after, recurrent, taps, dt_bias, a_log, norm)
    launch((count, v_heads, 1), tensors, (eps,), (mixed.stride(0), v_heads * v_dim))
    conv.copy_(after)
    return out


@cache
def _step(k_heads: int, v_heads: int, k_dim: int, v_dim: int, conv_size: int) -> KernelLauncher:
    constants = step_constants(k_heads, v_heads, k_dim, v_dim, conv_size)
    return KernelLauncher(step_heads, {"C": constants, **step_options(k_dim, v_dim)})


@triton.jit(do_not_specialize=["tokens"])
def scan_heads(out, q, k, v, log_decay, beta, recurrent, tokens, C: tl.constexpr):
    """The delta rule of one sequence's tokens, one after the other; some columns of the state stay in registers.

    Grid (v_heads, blocks of block_v columns). q, k: `[tokens, v_heads, k_dim]`; v, out: `[tokens, v_heads, v_dim]`;
    log_decay, beta: `[tokens, v_heads]`; recurrent: `[v_heads, k_dim, v_dim]`, updated in place. C: `DeltaConstants`.
    """
    V_HEADS: tl.constexpr = C.v_heads
    K_DIM: tl.constexpr = C.k_dim
    V_DIM: tl.constexpr = C.v_dim
    BLOCK_K: tl.constexpr = C.block_k
    BLOCK_V: tl.constexpr = C.block_v
    head, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    i, j = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    own_k, own_v = i < K_DIM, j < V_DIM
    place = recurrent + head * K_DIM * V_DIM + i[:, None] * V_DIM + j[None, :]
    own = own_k[:, None] & own_v[None, :]
    state = tl.load(place, mask=own, other=0.0)
    for t in range(tokens):
        at = head + t * V_HEADS
        query = tl.load(q + at * K_DIM + i, mask=own_k, other=0.0)
        key = tl.load(k + at * K_DIM + i, mask=own_k, other=0.0)
        value = tl.load(v + at * V_DIM + j, mask=own_v, other=0.0)
        state = state * tl.exp(tl.load(log_decay + at))
        delta = (value - tl.sum(state * key[:, None], axis=0)) * tl.load(beta + at)
        state += key[:, None] * delta[None, :]
        tl.store(out + at * V_DIM + j, tl.sum(state * query[:, None], axis=0), mask=own_v)
    tl.store(place, state, mask=own)


def scan(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> torch.Tensor:
    """The same as `gated_delta.chunked`: one sequence's tokens; returns `[tokens, v_heads, v_dim]`.

    The chunked form takes more registers than a program has: in float32 it spilled 1 to 10 KiB of them.
    """
    tokens, v_heads, v_dim = v.shape
    out = torch.empty_like(v, memory_format=torch.contiguous_format)
    inputs = tuple(each.contiguous() for each in (q, k, v, log_decay, beta))
    launch = _scan(v_heads, q.shape[2], v_dim)
    launch((v_heads, -(-v_dim // SCAN_COLUMNS), 1), (out, *inputs, state), (tokens,), ())
    return out


@cache
def _scan(v_heads: int, k_dim: int, v_dim: int) -> KernelLauncher:
    return KernelLauncher(scan_heads, {"C": scan_constants(v_heads, k_dim, v_dim), **scan_options()})


# Rules for type checkers are at the end, so that kernels keep their lines.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false
# pyright: reportOperatorIssue=false, reportGeneralTypeIssues=false, reportCallIssue=false
