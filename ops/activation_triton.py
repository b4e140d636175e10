"""Gated activations on a GPU. Import this module lazily: it needs triton."""

# A kernel is Triton's language in Python's syntax: its arguments and loops are not what type checkers take them for.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportCallIssue=false, reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl

from .elementwise_schedule import SILU_BLOCK, silu_constants, silu_options


@triton.jit
def silu_and_mul_rows(y, gate_up, gate_up_stride, y_stride, FFN: tl.constexpr, BLOCK: tl.constexpr):
    """y[t, i] = silu(gate_up[t, i]) · gate_up[t, FFN + i], silu rounded to y's dtype as the torch path rounds it.

    Grid (tokens, blocks of FFN). gate_up: [tokens, 2 · FFN], y: [tokens, FFN], rows …_stride apart.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = column < FFN
    place = gate_up + row * gate_up_stride + column
    gate = tl.load(place, mask=own, other=0.0).to(tl.float32)
    up = tl.load(place + FFN, mask=own, other=0.0).to(tl.float32)
    dtype = y.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(y + row * y_stride + column, (silu * up).to(dtype), mask=own)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """As `activation.silu_and_mul`."""
    tokens, ffn = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty(tokens, ffn, dtype=gate_up.dtype, device=gate_up.device)
    if not tokens:
        return y
    if gate_up.stride(1) != 1:
        raise ValueError("rows of gate_up are contiguous")
    silu_and_mul_rows[(tokens, -(-ffn // SILU_BLOCK))](
        y, gate_up, gate_up.stride(0), y.stride(0), **silu_constants(ffn), **silu_options()
    )
    return y
