"""Gated activations: torch on a CPU, Triton on a GPU."""

from __future__ import annotations

import torch


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) · up` for packed `[tokens, 2·ffn]` → `[tokens, ffn]`."""
    if gate_up.is_cuda:
        from . import activation_triton

        return activation_triton.silu_and_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up
