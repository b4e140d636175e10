"""Learned factors of the residual stream and of what is added to it, and what a router hands over to the next layer's
(ZAYA).

Tests: tests/core/layers/test_convolved_heads.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.layer_program import Kept
from ...program.op import ROUTER_STATE, Op

if TYPE_CHECKING:
    from ...program.torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class CarryRouterState(Op):
    """`out = x + weight · before`, which the next layer's router takes on; without a weight `out = x`."""

    READS = ("x", "before")
    WRITES = ("out",)
    SLOTS = ("weight",)
    LACKS = "router that goes over layers"

    x: str
    before: str | None = None
    weight: str | None = None
    out: str = ROUTER_STATE

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        index = at.index

        def run(step: Step) -> None:
            names = step.names
            x = names[self.x]
            if self.before is not None and self.weight is not None:
                x = x + names[self.before] * step.layers[index][self.weight]
            memory = step.kept.get(Kept(self.out, x.shape[1:]))
            names[self.out] = x if memory is None else memory.copy_(x)

        return run


@dataclass(frozen=True, slots=True)
class AddScaled(Op):
    """`x = (y + b) · w + (x + d) · v`, in place. scales: w, b, v and d, one behind the other `[4 · hidden]`."""

    READS = ("x", "y")
    WRITES = ("x",)
    SLOTS = ("scales",)
    LACKS = "residual stream with learned factors"

    x: str
    y: str
    scales: str

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        index = at.index

        def run(step: Step) -> None:
            x, y = step.names[self.x], step.names[self.y]
            scale, bias, own_scale, own_bias = step.layers[index][self.scales].float().view(4, -1)
            x.copy_((y.float() + bias) * scale + (x.float() + own_bias) * own_scale)

        return run
