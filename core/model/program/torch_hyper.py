"""The ops of hyper-connections in the torch interpreter.

Tests: tests/core/layers/test_hyper_connections.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import linear

from ..specs.hyper_connections import HyperConnectionSpec
from .hyper_ops import ConnectStreams, CopyToStreams, GiveToStreams, SumStreams
from .layer_program import Kept
from .torch_step import OpContext, Run, Step


def copy_to_streams(op: CopyToStreams, _: OpContext) -> Run:
    def run(step: Step) -> None:
        x = step.names[op.x]
        streams, memory = x[:, None].expand(-1, op.count, -1), step.kept.get(Kept(op.streams, (op.count, x.shape[1])))
        step.names[op.streams] = streams.contiguous() if memory is None else memory.copy_(streams)

    return run


def connect_streams(op: ConnectStreams, at: OpContext) -> Run:
    spec, index, count = op.hyper, at.index, op.hyper.count

    def run(step: Step) -> None:
        weights, names = step.layers[index], step.names
        flat, scale = names[op.streams].flatten(1).float(), weights[op.scale]
        found = linear(flat, weights[op.weight]) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + spec.eps)
        ends = [place for place in (count, 2 * count) if place < found.shape[1]]
        logits = [
            part * factor + base
            for part, factor, base in zip(
                found.tensor_split(ends, 1), scale.unbind(), weights[op.base].tensor_split(ends), strict=True
            )
        ]
        names[op.take] = torch.sigmoid(logits[0]) + spec.floor
        if op.give is not None:
            names[op.give] = spec.magnitude * torch.sigmoid(logits[1]) + spec.given_floor
        if op.mix is not None:
            names[op.mix] = balanced(logits[2].unflatten(1, (count, count)), spec).flatten(1)

    return run


def balanced(logits: torch.Tensor, spec: HyperConnectionSpec) -> torch.Tensor:
    """Matrices of positive numbers `[tokens, streams, streams]`, whose rows and columns add up to about 1."""
    found = logits.softmax(-1) + spec.floor
    found = found / (found.sum(-2, keepdim=True) + spec.floor)
    for _ in range(spec.rounds - 1):
        found = found / (found.sum(-1, keepdim=True) + spec.floor)
        found = found / (found.sum(-2, keepdim=True) + spec.floor)
    return found


def sum_streams(op: SumStreams, _: OpContext) -> Run:
    def run(step: Step) -> None:
        streams = step.names[op.streams]
        wide = streams.float()
        found = wide.mean(1) if op.take is None else (step.names[op.take][:, :, None] * wide).sum(1)
        step.names[op.out] = found.to(streams.dtype)

    return run


def give_to_streams(op: GiveToStreams, _: OpContext) -> Run:
    def run(step: Step) -> None:
        names = step.names
        streams = names[op.streams]
        kept, count = streams.float(), streams.shape[1]
        if op.mix is not None:
            kept = names[op.mix].unflatten(1, (count, count)).transpose(1, 2) @ kept
        streams.copy_(kept + names[op.give][:, :, None] * names[op.y].float()[:, None])

    return run
