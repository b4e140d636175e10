"""Ops of gated streams and of tables of n-grams in the torch interpreter.

Tests: tests/core/layers/test_gated_streams.py
"""

from __future__ import annotations

import math

import torch

from ..nvtx_spans import span
from .gated_ops import AddToStreams, GateLookup, LookUp, MeanOfGated, NormStreams, StreamNumbers
from .layer_program import Kept
from .torch_step import OpContext, Run, Step, reader

#: The least of a number whose root is taken.
_LEAST = 1e-6


def norm_streams(op: NormStreams, at: OpContext) -> Run:
    index, eps = at.index, op.norm.eps

    def run(step: Step) -> None:
        streams = step.names[op.streams]
        step.names[op.out] = _normed(streams, step.layers[index][op.weight], eps).flatten(1).to(streams.dtype)

    return run


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x: `[tokens, streams, hidden]`; weight: `[streams · hidden]`. In float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float().view(x.shape[1:])


def stream_numbers(op: StreamNumbers, _: OpContext) -> Run:
    read = reader(op.x)

    def run(step: Step) -> None:
        found = 2 * torch.sigmoid(read(step.names).float() / op.count)
        memory = step.kept.get(Kept(op.out, (op.count,), is_wide=True))
        step.names[op.out] = found if memory is None else memory.copy_(found)

    return run


def mean_of_gated(op: MeanOfGated, _: OpContext) -> Run:
    def run(step: Step) -> None:
        x = step.names[op.x]
        found = (torch.sigmoid(step.names[op.gates].float()) * x.float()).unflatten(1, (op.count, -1)).mean(1)
        step.names[op.out] = found.to(x.dtype)

    return run


def look_up(op: LookUp, at: OpContext) -> Run:
    index, model, kept = at.index, at.model, Kept(op.out, (op.lookup.width,))

    def run(step: Step) -> None:
        states = step.states
        if states is None:
            raise RuntimeError(f"layer {index} looks n-grams up, and the step has no states for it")
        memory = step.kept.get(kept)
        tokens = step.batch.token_ids  # of a captured piece: as many as its bucket has, and not as the step has
        tokens = tokens if memory is None else tokens[: len(memory)]
        with span("lookup.run"):
            numbers = states.mix(index, tokens[:, None], at.weights[op.weights].first, None)
            rows = at.weights[op.table].rows(numbers, model.dtype)
        step.names[op.out] = rows if memory is None else memory.copy_(rows)

    return run


def gate_lookup(op: GateLookup, at: OpContext) -> Run:
    index, eps = at.index, op.norm.eps

    def run(step: Step) -> None:
        names, weights = step.names, step.layers[index]
        streams = names[op.streams]
        keys, value = names[op.x].unflatten(1, (-1, streams.shape[2])).split((streams.shape[1], 1), 1)
        keys, query = _normed(keys, weights[op.norm_key], eps), _normed(streams, weights[op.norm_query], eps)
        gate = (keys * query).sum(-1, keepdim=True) / math.sqrt(streams.shape[2])
        gate = gate.abs().clamp_min(_LEAST).sqrt() * gate.sign()
        found = torch.sigmoid(gate) * value.float()
        for name, rows in ((op.out, found), (op.normed, _normed(found, weights[op.norm_out], eps))):
            names[name] = rows.flatten(1).to(streams.dtype)

    return run


def add_to_streams(op: AddToStreams, _: OpContext) -> Run:
    def run(step: Step) -> None:
        streams = step.names[op.streams]
        streams += (step.names[op.x] + step.names[op.y]).view(streams.shape)

    return run
