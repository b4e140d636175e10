"""Hyper-connections of several residual streams. See `HyperConnectionSpec`.

Tests: tests/core/layers/test_hyper_connections.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...specs.hyper_connections import HyperConnectionSpec
from ..layer_program import Kept
from ..op import STREAM, STREAMS, NoNativeOp, Op

if TYPE_CHECKING:
    from torch import Tensor

    from ..lowering import Lowering
    from ..torch_step import OpContext, Run, Step

#: The most streams that the native library mixes.
MOST_STREAMS = 16


@dataclass(frozen=True, slots=True)
class ConnectStreams(Op):
    """The numbers by which a part takes of streams `[tokens, streams]`, gives to them likewise, and mixes them
    `[tokens, streams²]`, in float32.
    """

    READS = ("streams",)
    WRITES = ("take", "give", "mix")
    SLOTS = ("weight", "base", "scale")

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

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        import torch

        from ..native_binding import weight_of

        spec, (streams, _, width) = self.hyper, to.read(at, self.streams)
        to.need("OpKind.kConnect", "residual of several streams")
        if spec.count > MOST_STREAMS:
            raise NoNativeOp(f"more than {MOST_STREAMS} residual streams")
        normed, ones = to.temporary("normed", width), torch.ones(width)
        to.emit("Norm", x=streams, column=0, width=width, out=normed, norm="kRms", eps=spec.eps, weight=ones)
        rows = spec.count * (1 + (self.give is not None)) + (0 if self.mix is None else spec.count**2)
        m, w = to.temporary("m", rows), weight_of(self.weight)
        to.emit("Product", x=normed, column=0, width=width, out=m, outputs=rows, w=w)
        numbers = {"floor": spec.floor, "magnitude": spec.magnitude, "given_floor": spec.given_floor}
        parts = {"take": self.take, "give": self.give, "mix": self.mix}
        outs = {name: to.held_as(to.written(at, each)) for name, each in parts.items() if each is not None}
        own = {"base": weight_of(self.base), "scale": weight_of(self.scale), "rounds": spec.rounds}
        to.emit("Connect", m=m, count=spec.count, **outs, **numbers, **own)

    def columns_of(self, write: str, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns_of`."""
        return self.hyper.count ** (2 if write == self.mix else 1)

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

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        width, own = self.columns((), to), {} if self.take is None else {"mix": to.held(at, self.take)}
        streams, _, columns = to.read(at, self.streams)
        shape = {"count": columns // width, "outs": 1, "width": width, "mixed": "kByNumbers"}
        to.emit("Streams", s=streams, out=to.out(to.written(at)), **shape, **own)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return to.stream.value.width


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

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        (streams, _, columns), y, width = to.read(at, self.streams), to.read(at, self.y)[0], to.stream.value.width
        count = columns // width
        own: dict[str, Any] = {"mixed": "kKept"}
        if self.mix is not None:
            own = {"mixed": "kByTransposed", "mix": to.held(at, self.mix)}
        shape = {"count": count, "outs": count, "width": width}
        to.emit("Streams", s=streams, out=streams, y=y, give=to.held(at, self.give), **shape, **own)

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

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        x, column, width = to.read(at, self.x)
        own = {"width": width, "groups": self.count, "out_column": 0}
        to.emit("Copy", x=x, column=column, out=to.held_as(to.written(at)), **own)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.count * given[0]

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
