"""The ops of several residual streams in the torch interpreter (AltUp).

Tests: tests/core/layers/test_streams.py
"""

from __future__ import annotations

from torch.nn.functional import linear

from ....ops.elementwise.elementwise import rms_norm
from .stream_ops import AddToOthers, CorrectStreams, PredictStreams, StreamFactors, TakeStream
from .torch_step import OpContext, Run, Step


def take_stream(op: TakeStream, _: OpContext) -> Run:
    def run(step: Step) -> None:
        step.names[op.out] = step.names[op.streams][:, op.active].clone()

    return run


def stream_factors(op: StreamFactors, at: OpContext) -> Run:
    index = at.index

    def run(step: Step) -> None:
        weights, rows = step.layers[index], step.names[op.x]
        routed = linear(rms_norm(rows, weights[op.router_norm], op.norm.eps), weights[op.router])
        step.names[op.out] = linear(routed.float().tanh().to(rows.dtype), weights[op.weight])

    return run


def predict_streams(op: PredictStreams, _: OpContext) -> Run:
    def run(step: Step) -> None:
        streams = step.names[op.streams]
        count = streams.shape[1]
        streams.baddbmm_(step.names[op.factors].view(-1, count, count), streams.clone())

    return run


def correct_streams(op: CorrectStreams, _: OpContext) -> Run:
    def run(step: Step) -> None:
        names = step.names
        factors, change = names[op.factors] + 1.0, names[op.x] - names[op.before]
        names[op.streams].addcmul_(factors[:, :, None], change[:, None])

    return run


def add_to_others(op: AddToOthers, _: OpContext) -> Run:
    def run(step: Step) -> None:
        step.names[op.streams][:, 1:] += step.names[op.y][:, None]

    return run
