"""Ops of ZAYA's layers in the torch interpreter.

Tests: tests/core/layers/test_convolved_heads.py
"""

from __future__ import annotations

from .builder import Kept
from .torch_step import OpContext, Run, Step
from .zaya_ops import AddScaled, CarryRouted, ScaleEmbeddings


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
