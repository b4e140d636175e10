"""Norms of heads and of scaled parts, and additions to the residual stream with learned factors (Muse Spark).

Tests: tests/core/layers/test_gated_residual.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.op import Op

if TYPE_CHECKING:
    from torch import Tensor

    from ...program.lowering import Lowering
    from ...program.torch_step import OpContext, Run, Step


#: The least square of the residual stream's factor.
_LEAST = 1e-3


@dataclass(frozen=True, slots=True)
class AddGated(Op):
    """`x = alpha · x + beta · y`, in place, with factors of each element that are made of a learned number w.

    `beta = sigmoid(w / temperature)`, and `alpha = sqrt(max(1 - beta², 0.001))`.
    """

    READS = ("x", "y")
    WRITES = ("x",)
    SLOTS = ("gate",)
    IN_PLACE = True

    x: str
    y: str
    gate: str
    temperature: float

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        alpha, beta = gate_factors(at.weights[self.gate], self.temperature)

        def run(step: Step) -> None:
            x, y = step.names[self.x], step.names[self.y]
            x.copy_(alpha * x + beta * y)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ...program.native_binding import weight_of

        gate = weight_of(self.gate)
        x, y = to.held(at, self.x), to.held(at, self.y)
        width, gated = x.value.width, to.temporary("gated", x.value.width)
        own = {"column": 0, "width": width, "out_column": 0, "factor": 1.0}
        to.emit("Scale", x=x, out=x, weights=lambda at: gate_factors(gate(at), self.temperature)[0], **own)
        to.emit("Scale", x=y, out=gated, weights=lambda at: gate_factors(gate(at), self.temperature)[1], **own)
        to.emit("Add", x=x, y=gated, width=width, factor=1.0)


@dataclass(frozen=True, slots=True)
class NormHeads(Op):
    """The norm of each head's elements, without weights. x: `[tokens, heads · width]`."""

    READS = ("x",)
    WRITES = ("out",)

    x: str
    out: str
    width: int
    eps: float

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch

        from .....ops.elementwise.elementwise import rms_norm

        ones = torch.ones(self.width, device=at.model.device)

        def run(step: Step) -> None:
            x = step.names[self.x]
            step.names[self.out] = rms_norm(x.reshape(-1, self.width), ones, self.eps).view(len(x), -1)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        import torch

        (x, column, width), out, ones = to.read(at, self.x), to.out(to.written(at)), torch.ones(self.width)
        own = {"norm": "kRms", "eps": self.eps, "weight": ones, "groups": width // self.width}
        to.emit("Norm", x=x, column=column, width=self.width, out=out, **own)


@dataclass(frozen=True, slots=True)
class NormScaled(Op):
    """The norm of `weight · x`, without weights of its own."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight",)

    x: str
    out: str
    weight: str
    eps: float

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.elementwise.elementwise import scaled_norm

        index = at.index

        def run(step: Step) -> None:
            step.names[self.out] = scaled_norm(step.names[self.x], step.layers[index][self.weight], self.eps)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        import torch

        from ...program.native_binding import weight_of

        (x, column, width), out = to.read(at, self.x), to.out(to.written(at))
        scaled, ones = to.temporary("scaled", width), torch.ones(width)
        own = {"x": x, "column": column, "width": width, "out_column": 0, "factor": 1.0}
        to.emit("Scale", **own, out=scaled, weights=weight_of(self.weight))
        to.emit("Norm", x=scaled, column=0, width=width, out=out, norm="kRms", eps=self.eps, weight=ones)


def gate_factors(gate: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The factors of the residual stream and of what is added, float32. See `AddGated`."""
    wide = gate.float() / temperature
    beta = wide.sigmoid()
    return ((-wide).sigmoid() * (1.0 + beta)).clamp(min=_LEAST).sqrt(), beta
