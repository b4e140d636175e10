"""Ops of relative attention, of convolutions of streams and of sinks among experts, in the torch interpreter.

Tests: tests/core/layers/test_relative_attention.py, tests/core/layers/test_stream_convs.py,
tests/core/layers/test_sink_experts.py
"""

from __future__ import annotations

from ..moe.sink_experts import mix_with_sinks
from ..nvtx_spans import span
from .inkling_ops import ConvolveStream, MoeWithSinks, TakeRelative
from .layer_program import Kept
from .torch_heads import query_growth
from .torch_step import OpContext, Run, Step, reader


def take_relative(op: TakeRelative, at: OpContext) -> Run:
    read, growth, heads = reader(op.x), query_growth(op.attention, at.model), op.attention.num_heads

    def run(step: Step) -> None:
        x = read(step.names)
        if growth is not None:
            x = (x.unflatten(1, (heads, -1)) * growth[step.batch.positions]).flatten(1).to(x.dtype)
        step.names[op.out] = x

    return run


def convolve_stream(op: ConvolveStream, at: OpContext) -> Run:
    read, index, kept, model = reader(op.x), at.index, Kept(op.out, (op.width,)), at.model

    def run(step: Step) -> None:
        states = step.states
        if states is None:
            raise RuntimeError(f"layer {index} has convolutions, and the step has no states for them")
        with span("recurrent.run"):
            y = states.mix(index, read(step.names), at.weights[op.weights].by_place[op.place], model.ranks)
        out = step.kept.get(kept)
        step.names[op.out] = y if out is None else out.copy_(y)

    return run


def moe_with_sinks(op: MoeWithSinks, at: OpContext) -> Run:
    read, index = reader(op.x), at.index

    def run(step: Step) -> None:
        weights, lora = step.layers[index], step.batch.lora
        added = None if lora is None else lora.mixture(index)
        y = mix_with_sinks(read(step.names), weights[op.experts], weights[op.sinks], op.spec, added)
        out = step.kept.get(Kept(op.out, y.shape[1:]))
        step.names[op.out] = y if out is None else out.copy_(y)

    return run
