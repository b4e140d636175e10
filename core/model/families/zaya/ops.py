"""Learned factors of the residual stream and of what is added to it (ZAYA).

Tests: tests/core/layers/test_convolved_heads.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.op import Op

if TYPE_CHECKING:
    from ...program.torch_step import OpContext, Run, Step


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
