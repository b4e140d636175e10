"""What becomes of the residual stream.

Tests: tests/core/paths
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..op import STREAM, Op

if TYPE_CHECKING:
    from ..lowering import Lowering
    from ..torch_step import OpContext, Run, Step


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
