"""Ops of learned factors and gates in the torch interpreter.

Tests: tests/core/layers/test_gated_residual.py, tests/core/layers/test_convolved_heads.py
"""

from __future__ import annotations

import torch

from ....ops.elementwise.elementwise import rms_norm, scaled_norm
from .factor_ops import AddGated, AddScaled, CarryRouted, NormHeads, NormScaled, ScaleEmbeddings
from .layer_program import Kept
from .torch_step import OpContext, Run, Step

#: The least square of the residual stream's factor.
_LEAST = 1e-3


def norm_heads(op: NormHeads, at: OpContext) -> Run:
    ones = torch.ones(op.width, device=at.model.device)

    def run(step: Step) -> None:
        x = step.names[op.x]
        step.names[op.out] = rms_norm(x.reshape(-1, op.width), ones, op.eps).view(len(x), -1)

    return run


def norm_scaled(op: NormScaled, at: OpContext) -> Run:
    index = at.index

    def run(step: Step) -> None:
        step.names[op.out] = scaled_norm(step.names[op.x], step.layers[index][op.weight], op.eps)

    return run


def add_gated(op: AddGated, at: OpContext) -> Run:
    alpha, beta = gate_factors(at.weights[op.gate], op.temperature)

    def run(step: Step) -> None:
        x, y = step.names[op.x], step.names[op.y]
        x.copy_(alpha * x + beta * y)

    return run


def gate_factors(gate: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The factors of the residual stream and of what is added, float32. See `AddGated`."""
    wide = gate.float() / temperature
    beta = torch.sigmoid(wide)
    return torch.sqrt(torch.clamp(torch.sigmoid(-wide) * (1.0 + beta), min=_LEAST)), beta


def add_scaled(op: AddScaled, at: OpContext) -> Run:
    index = at.index

    def run(step: Step) -> None:
        x, y = step.names[op.x], step.names[op.y]
        scale, bias, own_scale, own_bias = step.layers[index][op.scales].float().view(4, -1)
        x.copy_((y.float() + bias) * scale + (x.float() + own_bias) * own_scale)

    return run


def carry_routed(op: CarryRouted, at: OpContext) -> Run:
    index = at.index

    def run(step: Step) -> None:
        names = step.names
        x = names[op.x]
        if op.before is not None and op.weight is not None:
            x = x + names[op.before] * step.layers[index][op.weight]
        memory = step.kept.get(Kept(op.out, x.shape[1:]))
        names[op.out] = x if memory is None else memory.copy_(x)

    return run


def scale_embeddings(op: ScaleEmbeddings, at: OpContext) -> Run:
    index = at.index

    def run(step: Step) -> None:
        scale, bias = step.layers[index][op.scales]
        step.names[op.x].add_(bias).mul_(scale)

    return run
