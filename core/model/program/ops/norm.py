"""Norms: of rows, and of parts.

Tests: tests/core/paths, tests/core/layers/test_inner_norms.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...specs.norms import NormSpec
from ..op import Op, Read
from .moe import Moe

if TYPE_CHECKING:
    from ..lowering import Lowering
    from ..torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class Norm(Op):
    """`out = norm(x)`, with statistics in float32. With `added` (a peephole's), x becomes `x + added` first."""

    READS = ("x", "added")
    WRITES = ("out",)
    SLOTS = ("weight",)

    x: Read
    out: str
    weight: str
    norm: NormSpec
    added: str | None = None

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ..torch_norm import normed

        read, index, slot, out, added, norm = at.reader(self.x), at.index, self.weight, self.out, self.added, self.norm

        def run(step: Step) -> None:
            names = step.names
            y = None if added is None else names[added]
            names[out] = normed(read(names), step.layers[index][slot], norm, y)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ...native_names import native_norm
        from ..native_binding import weight_of

        x, column, width = to.read(at, self.x)
        out, kind = to.out(to.written(at)), native_norm(self.norm.kind)
        to.need(f"NormKind.{kind}", f"norm of the kind {self.norm.kind}")
        own = {"norm": kind, "eps": self.norm.eps, "weight": weight_of(self.weight)}
        to.emit("Norm", x=x, column=column, width=width, out=out, **own)
        is_routed = (isinstance(op, Moe) and op.router_reads == out.value.name for op in to.readers(out.value))
        if out.memory == "Rounded" and any(is_routed):  # best in the pass over tokens that has made it
            to.route(out, ahead=True)

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{self.norm.kind}, eps {self.norm.eps:g}: {self.weight}"


@dataclass(frozen=True, slots=True)
class NormParts(Op):
    """The RMS norm of each part of x that is as wide as the weight."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight",)

    x: str
    out: str
    weight: str
    eps: float

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.elementwise.elementwise import rms_norm

        index = at.index

        def run(step: Step) -> None:
            x, weight = step.names[self.x], step.layers[index][self.weight]
            step.names[self.out] = rms_norm(x.reshape(-1, len(weight)), weight, self.eps).view(x.shape)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from ..native_binding import weight_of

        (x, column, width), out, groups = to.read(at, self.x), to.out(to.written(at)), to.num_layers
        own = {"norm": "kRms", "eps": self.eps, "weight": weight_of(self.weight), "groups": groups}
        to.emit("Norm", x=x, column=column, width=width // groups, out=out, **own)

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"each layer's part, eps {self.eps:g}: {self.weight}"
