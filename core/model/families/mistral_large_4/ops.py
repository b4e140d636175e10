"""Log-n attention scaling with learned numbers (Mistral Large 4).

Tests: tests/core/layers/test_shared_latents.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.op import Op, Read

if TYPE_CHECKING:
    from ...program.lowering import Lowering
    from ...program.torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class LogScaleHeads(Op):
    """Heads of x times `scale · log(position + 1) + bias`, a learned number each for each head."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight",)

    x: Read
    out: str
    heads: int
    weight: str

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        read, index, slot = at.reader(self.x), at.index, self.weight

        def run(step: Step) -> None:
            x, (scale, bias) = read(step.names), step.layers[index][slot].view(2, -1)
            logarithms = (step.batch.positions + 1).float().log().to(x.dtype)
            factors = logarithms[:, None] * scale + bias
            step.names[self.out] = (x.unflatten(1, (self.heads, -1)) * factors[..., None]).flatten(1)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ...program.native_binding import weight_of

        to.need("OpKind.kLogScaleHeads", "log-n attention scaling with learned numbers")
        (x, column, width), out = to.read(at, self.x), to.out(to.written(at))
        own = {"heads": self.heads, "width": width // self.heads, "weight": weight_of(self.weight)}
        to.emit("LogScaleHeads", x=x, column=column, out=out, **own)
