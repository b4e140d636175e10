"""Several residual streams, which layers predict and correct (Gemma 3n).

Tests: tests/core/layers/test_streams.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.layer_program import Kept
from ...program.op import STREAM, STREAMS, Op
from ...specs.norms import NormSpec

if TYPE_CHECKING:
    from torch import Tensor

    from ...program.torch_step import OpContext, Run, Step


#: The least mean square that a stream is scaled by.
_LEAST_SQUARE = 1e-5


@dataclass(frozen=True, slots=True)
class TakeStream(Op):
    """`out = s[:, active]`, a copy."""

    READS = ("streams",)
    WRITES = ("out",)
    LACKS = "residual of several streams"

    out: str
    active: int
    streams: str = STREAMS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            step.names[self.out] = step.names[self.streams][:, self.active].clone()

        return run


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

    def formula(self) -> str:
        """See `Op.formula`."""
        return f"{self.streams}[1:] += {self.y}"


@dataclass(frozen=True, slots=True)
class SplitStreams(Op):
    """Several streams of x: the first is x, each other one a product of it, of the same magnitude."""

    READS = ("x",)
    WRITES = ("streams",)
    SLOTS = ("weights",)
    LACKS = "residual of several streams"

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

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"their mean: {', '.join(self.weights)}"


def _as_large(rows: Tensor, as_these: Tensor) -> Tensor:
    """Rows `[tokens, hidden]`, each multiplied so that it has the root mean square of the other."""
    want = as_these.square().mean(-1, keepdim=True) ** 0.5
    return rows * want / rows.square().mean(-1, keepdim=True).clamp(min=_LEAST_SQUARE).sqrt()
