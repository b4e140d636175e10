"""What becomes of the residual stream.

Tests: tests/core/paths, tests/core/layers/test_gated_residual.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..op import STREAM, Op

if TYPE_CHECKING:
    from torch import Tensor

    from ..lowering import Lowering
    from ..torch_step import OpContext, Run, Step


#: The least square of the residual stream's factor.
_LEAST = 1e-3


@dataclass(frozen=True, slots=True)
class Add(Op):
    """`x += y`."""

    READS = ("x", "y")
    WRITES = ("x",)
    IN_PLACE = True

    x: str
    y: str

    @property
    def adds(self) -> str | None:
        """See `Op.adds`."""
        return self.y if self.x == STREAM else None

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            step.names[self.x].add_(step.names[self.y])

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        x, y = to.held(at, self.x), to.held(at, self.y)
        to.emit("Add", x=x, y=y, width=y.value.width, factor=1.0)

    def formula(self) -> str:
        """See `Op.formula`."""
        return f"{self.x} += {self.y}"


@dataclass(frozen=True, slots=True)
class Replace(Op):
    """x becomes y, in place."""

    READS = ("x", "y")
    WRITES = ("x",)
    IN_PLACE = True

    x: str
    y: str

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            step.names[self.x].copy_(step.names[self.y])

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        x, y = to.held(at, self.x), to.held(at, self.y)
        to.emit("Copy", x=y, column=0, width=y.value.width, out=x, out_column=0)

    def formula(self) -> str:
        """See `Op.formula`."""
        return f"{self.x} ← {self.y}"


@dataclass(frozen=True, slots=True)
class AddMedia(Op):
    """`x += part` of an image's row, of tokens that stand for one; see `MediaRows`."""

    READS = ("x",)
    WRITES = ("x",)
    IN_PLACE = True

    x: str
    part: int

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            if (media := step.batch.media) is not None:
                x = step.names[self.x]
                x.index_add_(0, media.places.to(x.device), media.part(self.part, x.shape[1]).to(x.device, x.dtype))

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        to.need("OpKind.kAddMedia", "addition of images' rows")
        x = to.held(at, self.x)
        to.emit("AddMedia", x=x, width=x.value.width, part=self.part)

    def formula(self) -> str:
        """See `Op.formula`."""
        return f"{self.x} += image[{self.part}]"


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
        from ..native_binding import weight_of

        gate = weight_of(self.gate)
        x, y = to.held(at, self.x), to.held(at, self.y)
        width, gated = x.value.width, to.temporary("gated", x.value.width)
        own = {"column": 0, "width": width, "out_column": 0, "factor": 1.0}
        to.emit("Scale", x=x, out=x, weights=lambda at: gate_factors(gate(at), self.temperature)[0], **own)
        to.emit("Scale", x=y, out=gated, weights=lambda at: gate_factors(gate(at), self.temperature)[1], **own)
        to.emit("Add", x=x, y=gated, width=width, factor=1.0)


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


@dataclass(frozen=True, slots=True)
class AllReduce(Op):
    """The sum of all ranks' y, on each of them."""

    READS = ("y",)
    WRITES = ("y",)
    SUMS = True

    y: str

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        model = at.model

        def run(step: Step) -> None:
            if model.ranks is not None:
                step.names[self.y] = model.ranks.add_up(step.names[self.y])

        return run


def gate_factors(gate: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The factors of the residual stream and of what is added, float32. See `AddGated`."""
    wide = gate.float() / temperature
    beta = wide.sigmoid()
    return ((-wide).sigmoid() * (1.0 + beta)).clamp(min=_LEAST).sqrt(), beta
