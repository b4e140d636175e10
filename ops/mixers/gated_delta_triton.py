"""Gated DeltaNet on a GPU: a decode step in one launch, and the delta rule of a prompt in one.

The arithmetic is that of `gated_delta`, in float32. Import this module lazily: it needs triton.

Tests: tests/ops/mixers/test_gated_delta_interpreted.py, tests/core/model/test_paged_states_interpreted.py
"""

# A kernel is Triton's language in Python's syntax, so type checkers misread its arguments and loops.

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..launch_triton import KernelLauncher
from .gated_delta_schedule import SCAN_COLUMNS, StepConstants, scan_constants, scan_options, step_options


@triton.jit
def _draft(pages, table, page_stride, layer, draft, C: tl.constexpr):
    """The row of a draft's inputs; of the nearest where there is no such draft. table: pages of the state that is read,
    or of the one that is written.
    """
    at = layer * C.most_drafts + tl.minimum(tl.maximum(draft, 0), C.most_drafts - 1)
    page = tl.load(table + C.draft_page + at // C.drafts_per_page)
    return pages + page * page_stride + at % C.drafts_per_page * C.draft_elems


@triton.jit
def _convolved(x, conv_in, conv_out, draft_out, source, taps, channel, own, stored, t, accepted, C: tl.constexpr):
    """silu of the convolution of some channels, over the inputs that end with input t of the sequence.

    x: the row of the sequence's first token. conv_in, conv_out: `[conv - 1, channels]` of its state. draft_out: where
    the inputs go if t is a draft. source: `(begins, pages, read pages, page_stride, layer, mixed_stride)`. stored:
    the program stores what the sequence keeps of channels below it.
    """
    begins, pages, read, page_stride, layer, mixed_stride = source
    CONV: tl.constexpr = C.conv
    CHANNELS: tl.constexpr = C.channels
    own_out = own & (channel < stored)
    total = tl.zeros_like(channel).to(tl.float32)
    for tap in tl.static_range(CONV):
        at = t + tap - (CONV - 1)
        if C.most_drafts > 0:
            row = tl.where(at < 0, conv_in + (at + CONV - 1) * CHANNELS, _draft(pages, read, page_stride, layer, at, C))
            y = tl.load(row + channel, mask=own, other=0.0)
            newer = tl.load(x + tl.maximum(at - accepted, 0) * mixed_stride + channel, mask=own, other=0.0)
            y = tl.where(at >= accepted, newer.to(tl.float32), y)
            y = tl.where((at < 0) & (begins != 0), 0.0, y)
        elif tap < CONV - 1:
            y = tl.load(conv_in + tap * CHANNELS + channel, mask=own, other=0.0)
            y = tl.where(begins != 0, 0.0, y)
        else:
            y = tl.load(x + channel, mask=own, other=0.0).to(tl.float32)
        total += y * tl.load(taps + tap * CHANNELS + channel, mask=own, other=0.0)
        if tap > 0 and t == accepted:
            tl.store(conv_out + (tap - 1) * CHANNELS + channel, y, mask=own_out)
        if C.most_drafts > 0 and tap == CONV - 1 and t > accepted:
            tl.store(draft_out + channel, y, mask=own_out)
    return total * tl.sigmoid(total)


@triton.jit(do_not_specialize=["layer"])
def step_heads(
    out,
    mixed,
    pages,
    table,
    taps,
    dt_bias,
    a_log,
    norm,
    eps,
    layer,
    mixed_stride,
    out_stride,
    page_stride,
    C: tl.constexpr,
):
    """A known token of each sequence, and drafts after it, from the input projection's rows to the output projection's.

    A state stays in registers from its first token to its last: it is read from pages, takes in the accepted drafts of
    the step before and the known token, and is written to other pages. Then it goes on over the step's drafts, whose
    inputs are stored.
    Grid (sequences, v_heads). mixed, out: rows with the given strides. pages: float32, page_stride elements each.
    table, layer: see `step_in_pages`. C: `StepConstants`.
    """
    K_HEADS: tl.constexpr = C.k_heads
    V_HEADS: tl.constexpr = C.v_heads
    K_DIM: tl.constexpr = C.k_dim
    V_DIM: tl.constexpr = C.v_dim
    CHANNELS: tl.constexpr = C.channels
    GROUP: tl.constexpr = V_HEADS // K_HEADS
    head = tl.program_id(1)
    entry = table + tl.program_id(0).to(tl.int64) * (4 + 2 * C.num_pages)
    tokens, begins = tl.load(entry + 1), tl.load(entry + 3)
    if tokens == 0:
        return
    read, written = entry + 4, entry + 4 + C.num_pages
    accepted, total = tl.zeros_like(tokens), 1
    if C.most_drafts > 0:
        accepted = tl.load(entry + 2)
        total = accepted + tokens
    first = tl.load(entry)
    x, y_out = mixed + first * mixed_stride, out + first * out_stride + head * V_DIM
    at = layer // C.convs_per_page
    conv = layer % C.convs_per_page * ((C.conv - 1) * CHANNELS)
    conv_in = pages + tl.load(read + at) * page_stride + conv
    conv_out = pages + tl.load(written + at) * page_stride + conv
    at = layer * V_HEADS + head
    i, j = tl.arange(0, C.block_k), tl.arange(0, C.block_v)
    own_k, own_v = i < K_DIM, j < V_DIM
    own = own_k[:, None] & own_v[None, :]
    place = at % C.heads_per_page * (K_DIM * V_DIM) + i[:, None] * V_DIM + j[None, :]
    at = C.conv_pages + at // C.heads_per_page
    state_in = pages + tl.load(read + at) * page_stride
    state_out = pages + tl.load(written + at) * page_stride
    state = tl.load(state_in + place, mask=own, other=0.0)
    state = tl.where(begins != 0, 0.0, state)
    source = begins, pages, read, page_stride, layer, mixed_stride
    q_channel = head // GROUP * K_DIM + i
    k_channel, v_channel = K_HEADS * K_DIM + q_channel, 2 * K_HEADS * K_DIM + head * V_DIM + j
    stored = tl.where(head % GROUP == 0, CHANNELS, 0)  # one of the heads that share q and k stores their inputs
    log_decay, bias = tl.load(a_log + head), tl.load(dt_bias + head)
    for t in range(total):
        kept = pages
        if C.most_drafts > 0:
            kept = _draft(pages, written, page_stride, layer, t - accepted - 1, C)
        q = _convolved(x, conv_in, conv_out, kept, source, taps, q_channel, own_k, stored, t, accepted, C)
        k = _convolved(x, conv_in, conv_out, kept, source, taps, k_channel, own_k, stored, t, accepted, C)
        v = _convolved(x, conv_in, conv_out, kept, source, taps, v_channel, own_v, CHANNELS, t, accepted, C)
        q = tl.where(own_k, q, 0.0)
        k = tl.where(own_k, k, 0.0)
        q = q * (tl.rsqrt(tl.sum(q * q, axis=0) + 1e-6) * (K_DIM**-0.5))
        k = k * tl.rsqrt(tl.sum(k * k, axis=0) + 1e-6)
        is_own = t >= accepted
        row = x + (t - accepted) * mixed_stride + CHANNELS
        gates = row + V_HEADS * V_DIM + head
        b = tl.load(gates, mask=is_own, other=0.0).to(tl.float32)
        a = tl.load(gates + V_HEADS, mask=is_own, other=0.0).to(tl.float32)
        if C.most_drafts > 0:
            taken = _draft(pages, read, page_stride, layer, t, C) + CHANNELS + head
            b += tl.load(taken, mask=t < accepted, other=0.0)
            a += tl.load(taken + V_HEADS, mask=t < accepted, other=0.0)
            tl.store(kept + CHANNELS + head, b, mask=t > accepted)
            tl.store(kept + CHANNELS + V_HEADS + head, a, mask=t > accepted)
        a += bias
        softplus = tl.where(a > 20.0, a, tl.log(1.0 + tl.exp(tl.minimum(a, 20.0))))
        state *= tl.exp(-tl.exp(log_decay) * softplus)
        delta = (v - tl.sum(state * k[:, None], axis=0)) * tl.sigmoid(b)
        state += k[:, None] * delta[None, :]
        if t == accepted:
            tl.store(state_out + place, state, mask=own)
        if is_own:
            y = tl.where(own_v, tl.sum(state * q[:, None], axis=0), 0.0)
            z = tl.load(row + head * V_DIM + j, mask=own_v, other=0.0).to(tl.float32)
            y = y * tl.rsqrt(tl.sum(y * y, axis=0) / V_DIM + eps) * tl.load(norm + j, mask=own_v, other=0.0)
            y = (y * z * tl.sigmoid(z)).to(out.dtype.element_ty)
            tl.store(y_out + (t - accepted) * out_stride + j, y, mask=own_v)


def step(
    out: torch.Tensor,
    mixed: torch.Tensor,
    taps: torch.Tensor,
    dt_bias: torch.Tensor,
    a_log: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    pages: torch.Tensor,
    table: torch.Tensor,
    layer: int,
    constants: StepConstants,
) -> None:
    """See `gated_delta.step_in_pages`."""
    tensors = (out, mixed, pages, table, taps, dt_bias, a_log, norm)
    strides = mixed.stride(0), out.stride(0), pages.stride(0)
    _step(constants)((len(table), constants.v_heads, 1), tensors, (eps, layer), strides)


@cache
def _step(constants: StepConstants) -> KernelLauncher:
    return KernelLauncher(step_heads, {"C": constants, **step_options()})


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
