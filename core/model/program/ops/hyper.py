"""Hyper-connections of several residual streams. See `HyperConnectionSpec`.

Tests: tests/core/layers/test_hyper_connections.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...specs.hyper_connections import HyperConnectionSpec
from ..layer_program import Kept
from ..op import STREAM, STREAMS, Op

if TYPE_CHECKING:
    from torch import Tensor

    from ..torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class ConnectStreams(Op):
    """The numbers by which a part takes of streams `[tokens, streams]`, gives to them likewise, and mixes them
    `[tokens, streams²]`, in float32.
    """

    READS = ("streams",)
    WRITES = ("take", "give", "mix")
    SLOTS = ("weight", "base", "scale")
    LACKS = "residual of several streams"

    hyper: HyperConnectionSpec
    weight: str
    base: str
    scale: str
    take: str
    give: str | None = None
    mix: str | None = None
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch
        from torch.nn.functional import linear

        spec, index, count = self.hyper, at.index, self.hyper.count

        def run(step: Step) -> None:
            weights, names = step.layers[index], step.names
            flat, scale = names[self.streams].flatten(1).float(), weights[self.scale]
            found = linear(flat, weights[self.weight]) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + spec.eps)
            ends = [place for place in (count, 2 * count) if place < found.shape[1]]
            logits = [
                part * factor + base
                for part, factor, base in zip(
                    found.tensor_split(ends, 1), scale.unbind(), weights[self.base].tensor_split(ends), strict=True
                )
            ]
            names[self.take] = torch.sigmoid(logits[0]) + spec.floor
            if self.give is not None:
                names[self.give] = spec.magnitude * torch.sigmoid(logits[1]) + spec.given_floor
            if self.mix is not None:
                names[self.mix] = balanced(logits[2].unflatten(1, (count, count)), spec).flatten(1)

        return run

    def detail(self) -> str:
        """See `Op.detail`."""
        mixed = "" if self.mix is None else f", mixed by {self.hyper.rounds} rounds of Sinkhorn-Knopp"
        return f"numbers of {self.hyper.count} streams, eps {self.hyper.eps:g}{mixed}: {self.weight}"


@dataclass(frozen=True, slots=True)
class SumStreams(Op):
    """`out = Σ take · s`, rounded once; without numbers the mean of the streams."""

    READS = ("take", "streams")
    WRITES = ("out",)

    out: str
    take: str | None = None
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            streams = step.names[self.streams]
            wide = streams.float()
            found = wide.mean(1) if self.take is None else (step.names[self.take][:, :, None] * wide).sum(1)
            step.names[self.out] = found.to(streams.dtype)

        return run


@dataclass(frozen=True, slots=True)
class GiveToStreams(Op):
    """`s = mixᵀ · s + give ⊗ y`, rounded once; without `mix` the streams are only added to."""

    READS = ("y", "give", "mix", "streams")
    WRITES = ("streams",)

    y: str
    give: str
    mix: str | None = None
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            names = step.names
            streams = names[self.streams]
            kept, count = streams.float(), streams.shape[1]
            if self.mix is not None:
                kept = names[self.mix].unflatten(1, (count, count)).transpose(1, 2) @ kept
            streams.copy_(kept + names[self.give][:, :, None] * names[self.y].float()[:, None])

        return run

    def formula(self) -> str:
        """See `Op.formula`."""
        kept = self.streams if self.mix is None else f"{self.mix}ᵀ · {self.streams}"
        return f"{self.streams} ← {kept} + {self.give} ⊗ {self.y}"


@dataclass(frozen=True, slots=True)
class CopyToStreams(Op):
    """Several streams, each equal to x."""

    READS = ("x",)
    WRITES = ("streams",)

    count: int
    x: str = STREAM
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            x = step.names[self.x]
            streams, memory = (
                x[:, None].expand(-1, self.count, -1),
                step.kept.get(Kept(self.streams, (self.count, x.shape[1]))),
            )
            step.names[self.streams] = streams.contiguous() if memory is None else memory.copy_(streams)

        return run

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{self.count} streams, all of them x"


def balanced(logits: Tensor, spec: HyperConnectionSpec) -> Tensor:
    """Matrices of positive numbers `[tokens, streams, streams]`, whose rows and columns add up to about 1."""
    found = logits.softmax(-1) + spec.floor
    found = found / (found.sum(-2, keepdim=True) + spec.floor)
    for _ in range(spec.rounds - 1):
        found = found / (found.sum(-1, keepdim=True) + spec.floor)
        found = found / (found.sum(-2, keepdim=True) + spec.floor)
    return found
