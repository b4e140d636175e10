"""Several residual streams, which layers predict and correct (Gemma 3n).

Tests: tests/core/layers/test_streams.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.layer_program import Kept
from ...program.op import STREAM, STREAMS, NoNativeOp, Op
from ...program.ops.hyper import MOST_STREAMS
from ...specs.norms import NormSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ...program.lowering import Lowering
    from ...program.native_registers import Held
    from ...program.torch_step import OpContext, Run, Step


#: The least mean square that a stream is scaled by.
_LEAST_SQUARE = 1e-5


@dataclass(frozen=True, slots=True)
class TakeStream(Op):
    """`out = s[:, active]`, a copy."""

    READS = ("streams",)
    WRITES = ("out",)

    out: str
    active: int
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            step.names[self.out] = step.names[self.streams][:, self.active].clone()

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        x, out, width = to.read(at, self.streams)[0], to.out(to.written(at)), to.stream.value.width
        to.emit("Copy", x=x, column=self.active * width, width=width, out=out, out_column=0)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return to.stream.value.width


@dataclass(frozen=True, slots=True)
class StreamFactors(Op):
    """Products of the numbers that a stream's rows x are routed to, with a matrix of the layer."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("router_norm", "router", "weight")

    x: str
    out: str
    weight: str
    norm: NormSpec
    rows: int
    """Of the matrix."""

    router: str = "stream_router"
    router_norm: str = "stream_router_norm"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from torch.nn.functional import linear

        from .....ops.elementwise.elementwise import rms_norm

        index = at.index

        def run(step: Step) -> None:
            weights, rows = step.layers[index], step.names[self.x]
            routed = linear(rms_norm(rows, weights[self.router_norm], self.norm.eps), weights[self.router])
            step.names[self.out] = linear(routed.float().tanh().to(rows.dtype), weights[self.weight])

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ...program.native_binding import weight_of

        (x, column, width), count = to.read(at, self.x), _count(to)
        normed, routed = to.temporary("normed", width), to.temporary("routed", count)
        own = {"norm": "kRms", "eps": self.norm.eps, "weight": weight_of(self.router_norm)}
        to.emit("Norm", x=x, column=column, width=width, out=normed, **own)
        router = {"outputs": count, "w": weight_of(self.router), "tanh": 1}
        to.emit("Product", x=normed, column=0, width=width, out=routed, **router)
        rows = {"outputs": self.rows, "w": weight_of(self.weight)}
        to.emit("Product", x=routed, column=0, width=count, out=to.held_as(to.written(at)), **rows)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.rows


@dataclass(frozen=True, slots=True)
class PredictStreams(Op):
    """`s += factors · s`: every stream takes of each."""

    READS = ("factors", "streams")
    WRITES = ("streams",)

    factors: str
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            streams = step.names[self.streams]
            count = streams.shape[1]
            streams.baddbmm_(step.names[self.factors].view(-1, count, count), streams.clone())

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        streams, count = to.held(at, self.streams), _count(to)
        own = {"count": count, "outs": count, "width": to.stream.value.width, "mixed": "kAddedTo"}
        to.emit("Streams", s=streams, out=streams, mix=to.held(at, self.factors), **own)

    def formula(self) -> str:
        """See `Op.formula`."""
        return f"{self.streams} += {self.factors} · {self.streams}"


@dataclass(frozen=True, slots=True)
class CorrectStreams(Op):
    """`s += (1 + factors) ⊗ (x - before)`: every stream takes of the active one's change."""

    READS = ("factors", "x", "before", "streams")
    WRITES = ("streams",)

    factors: str
    x: str
    before: str
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            names = step.names
            factors, change = names[self.factors] + 1.0, names[self.x] - names[self.before]
            names[self.streams].addcmul_(factors[:, :, None], change[:, None])

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        streams, count, width = to.held(at, self.streams), _count(to), to.stream.value.width
        change = to.temporary("change", width)
        to.emit("Copy", x=to.read(at, self.x)[0], column=0, width=width, out=change, out_column=0)
        to.emit("Add", x=change, y=to.read(at, self.before)[0], width=width, factor=-1.0)
        own = {"count": count, "outs": count, "width": width, "mixed": "kKept", "given": 1.0}
        to.emit("Streams", s=streams, out=streams, y=change, give=to.held(at, self.factors), **own)

    def formula(self) -> str:
        """See `Op.formula`."""
        return f"{self.streams} += (1 + {self.factors}) ⊗ ({self.x} - {self.before})"


@dataclass(frozen=True, slots=True)
class AddToOthers(Op):
    """`s[:, 1:] += y`."""

    READS = ("y", "streams")
    WRITES = ("streams",)

    y: str
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            step.names[self.streams][:, 1:] += step.names[self.y][:, None]

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        streams, y, width = to.held(at, self.streams), to.read(at, self.y)[0], to.stream.value.width
        for stream in range(1, _count(to)):
            to.emit("Add", x=streams, y=y, width=width, factor=1.0, column=stream * width)

    def formula(self) -> str:
        """See `Op.formula`."""
        return f"{self.streams}[1:] += {self.y}"


@dataclass(frozen=True, slots=True)
class SplitStreams(Op):
    """Several streams of x: the first is x, each other one a product of it, of the same magnitude."""

    READS = ("x",)
    WRITES = ("streams",)
    SLOTS = ("weights",)

    weights: tuple[str, ...]
    x: str = STREAM
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...program.torch_gemm import backend_for, multiply

        index, count = at.index, len(self.weights) + 1

        def run(step: Step) -> None:
            x, weights, backends = step.names[self.x], step.layers[index], step.batch.backends
            memory = step.kept.get(Kept(self.streams, (count, x.shape[1])))
            streams = x.new_empty(len(x), count, x.shape[1]) if memory is None else memory
            streams[:, 0] = x
            for stream, slot in enumerate(self.weights, 1):
                weight = weights[slot]
                streams[:, stream] = _as_large(multiply(backend_for(backends, weight), x, weight), x)
            step.names[self.streams] = streams

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        to.need("OpKind.kMatch", "residual of several streams")
        if self.count > MOST_STREAMS:
            raise NoNativeOp(f"more than {MOST_STREAMS} residual streams")
        x, rounded, out = to.held(at, self.x), to.read_rounded(at, self.x), to.held_as(to.written(at))
        width = x.value.width
        to.emit("Copy", x=x, column=0, width=width, out=out, out_column=0)
        for stream, slot in enumerate(self.weights, 1):
            _multiplied(to, slot, rounded, x, out, stream * width)

    @property
    def count(self) -> int:
        """Streams."""
        return len(self.weights) + 1

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.count * given[0]

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{len(self.weights) + 1} streams: {', '.join(self.weights)}"


@dataclass(frozen=True, slots=True)
class JoinStreams(Op):
    """x is the mean of the first stream and of a product of each other one, of the same magnitude."""

    READS = ("streams",)
    WRITES = ("x",)
    SLOTS = ("weights",)

    weights: tuple[str, ...]
    x: str = STREAM
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch

        from ...program.torch_gemm import backend_for, multiply

        index = at.index

        def run(step: Step) -> None:
            weights, backends = step.layers[index], step.batch.backends
            first, *others = (each.contiguous() for each in step.names[self.streams].unbind(1))
            pairs = zip(others, (weights[slot] for slot in self.weights), strict=True)
            products = (multiply(backend_for(backends, weight), each, weight) for each, weight in pairs)
            found = torch.stack([first, *(_as_large(each, first) for each in products)])
            step.names[self.x].copy_(found.mean(0))

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        streams, width = to.held(at, self.streams), to.stream.value.width
        part, factor = to.temporary("part", width), 1 / (len(self.weights) + 1)
        to.emit("Copy", x=streams, column=0, width=width, out=to.stream, out_column=0)
        for stream, slot in enumerate(self.weights, 1):
            rounded = to.held_as(part.value, "Rounded")
            to.emit("Copy", x=streams, column=stream * width, width=width, out=rounded, out_column=0)
            _multiplied(to, slot, rounded, streams, part, 0)
            to.emit("Add", x=to.stream, y=part, width=width, factor=1.0)
        own = {"column": 0, "width": width, "out_column": 0, "factor": factor}
        to.emit("Scale", x=to.stream, out=to.stream, **own)

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"their mean: {', '.join(self.weights)}"


def _count(to: Lowering) -> int:
    """Streams of the model."""
    return to.lasting[STREAMS].width // to.stream.value.width


def _multiplied(to: Lowering, slot: str, x: Held, as_these: Held, out: Held, column: int) -> None:
    """List a product of x with a matrix, in columns of out, as large as the first columns of another buffer."""
    from ...program.native_binding import weight_of

    width = to.stream.value.width
    product = to.temporary("product", width)
    own = {"inputs": width, "outputs": width, "module": -1, "w": weight_of(slot)}
    to.emit("Multiply", x=x, out=product, **own)
    to.emit("Match", x=product, y=as_these, width=width, out=out, out_column=column, least=_LEAST_SQUARE)


def _as_large(rows: Tensor, as_these: Tensor) -> Tensor:
    """Rows `[tokens, hidden]`, each multiplied so that it has the root mean square of the other."""
    want = as_these.square().mean(-1, keepdim=True) ** 0.5
    return rows * want / rows.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
