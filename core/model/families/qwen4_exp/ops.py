"""Gated residual streams, and tables of n-grams (Qwen4-Exp).

Tests: tests/core/layers/test_gated_streams.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.layer_program import Kept
from ...program.op import STREAMS, Op, Read
from ...specs.norms import NormSpec
from .ngrams import NgramSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ...program.torch_step import OpContext, Run, Step


#: The least of a number whose root is taken.
_LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class NormStreams(Op):
    """The norm of each stream by itself, with weights of all: `[tokens, streams · hidden]`."""

    READS = ("streams",)
    WRITES = ("out",)
    SLOTS = ("weight",)
    LACKS = "gated residual streams"

    out: str
    weight: str
    norm: NormSpec
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        index, eps = at.index, self.norm.eps

        def run(step: Step) -> None:
            streams = step.names[self.streams]
            step.names[self.out] = _normed(streams, step.layers[index][self.weight], eps).flatten(1).to(streams.dtype)

        return run


@dataclass(frozen=True, slots=True)
class StreamNumbers(Op):
    """`out = 2 · sigmoid(x / count)`, of each stream, in float32."""

    READS = ("x",)
    WRITES = ("out",)

    x: Read
    out: str
    count: int

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch

        read = at.reader(self.x)

        def run(step: Step) -> None:
            found = 2 * torch.sigmoid(read(step.names).float() / self.count)
            memory = step.kept.get(Kept(self.out, (self.count,), is_wide=True))
            step.names[self.out] = found if memory is None else memory.copy_(found)

        return run


@dataclass(frozen=True, slots=True)
class MeanOfGated(Op):
    """`out = mean(sigmoid(gates) · x)` over the streams. gates, x: `[tokens, streams · hidden]`."""

    READS = ("gates", "x")
    WRITES = ("out",)

    gates: str
    x: str
    out: str
    count: int

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch

        def run(step: Step) -> None:
            x = step.names[self.x]
            found = (torch.sigmoid(step.names[self.gates].float()) * x.float()).unflatten(1, (self.count, -1)).mean(1)
            step.names[self.out] = found.to(x.dtype)

        return run


@dataclass(frozen=True, slots=True)
class LookUp(Op):
    """A token's rows of a table, by it and those before it, side by side; sequences' last tokens go on."""

    WRITES = ("out",)
    SLOTS = ("weights", "table")
    IS_CUT = True
    LACKS = "table of n-grams"

    out: str
    lookup: NgramSpec
    weights: str = "lookup"
    table: str = "lookup_table"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...nvtx_spans import span

        index, model, kept = at.index, at.model, Kept(self.out, (self.lookup.width,))

        def run(step: Step) -> None:
            states = step.states
            if states is None:
                raise RuntimeError(f"layer {index} looks n-grams up, and the step has no states for it")
            memory = step.kept.get(kept)
            tokens = step.batch.token_ids  # of a captured piece: as many as its bucket has, and not as the step has
            tokens = tokens if memory is None else tokens[: len(memory)]
            with span("lookup.run"):
                numbers = states.mix(index, tokens[:, None], at.weights[self.weights].first, None)
                rows = at.weights[self.table].rows(numbers, model.dtype)
            step.names[self.out] = rows if memory is None else memory.copy_(rows)

        return run


@dataclass(frozen=True, slots=True)
class GateLookup(Op):
    """What streams take of a token's rows, and the norm of that: see `NgramSpec`.

    x: keys of all streams, and a value `[tokens, (streams + 1) · hidden]`.
    """

    READS = ("x", "streams")
    WRITES = ("out", "normed")
    SLOTS = ("norm_key", "norm_query", "norm_out")

    x: str
    out: str
    normed: str
    norm: NormSpec
    norm_key: str = "lookup_norm_key"
    norm_query: str = "lookup_norm_query"
    norm_out: str = "lookup_norm_conv"
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import math

        import torch

        index, eps = at.index, self.norm.eps

        def run(step: Step) -> None:
            names, weights = step.names, step.layers[index]
            streams = names[self.streams]
            keys, value = names[self.x].unflatten(1, (-1, streams.shape[2])).split((streams.shape[1], 1), 1)
            keys, query = _normed(keys, weights[self.norm_key], eps), _normed(streams, weights[self.norm_query], eps)
            gate = (keys * query).sum(-1, keepdim=True) / math.sqrt(streams.shape[2])
            gate = gate.abs().clamp_min(_LEAST).sqrt() * gate.sign()
            found = torch.sigmoid(gate) * value.float()
            for name, rows in ((self.out, found), (self.normed, _normed(found, weights[self.norm_out], eps))):
                names[name] = rows.flatten(1).to(streams.dtype)

        return run


@dataclass(frozen=True, slots=True)
class AddToStreams(Op):
    """`s += x + y`. x, y: `[tokens, streams · hidden]`."""

    READS = ("x", "y", "streams")
    WRITES = ("streams",)

    x: str
    y: str
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            streams = step.names[self.streams]
            streams += (step.names[self.x] + step.names[self.y]).view(streams.shape)

        return run


def _normed(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x: `[tokens, streams, hidden]`; weight: `[streams · hidden]`. In float32."""
    wide = x.float()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.float().view(x.shape[1:])
