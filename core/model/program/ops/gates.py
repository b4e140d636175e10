"""Gates of outputs, and sparse ones.

Tests: tests/core/layers/test_latent_gates.py, tests/core/paths
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..op import NoNativeOp, Op, Read

if TYPE_CHECKING:
    from ..lowering import Lowering
    from ..torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class GateOutput(Op):
    """`x · sigmoid(gates)`, or `x · log(1 + e^gates)`."""

    READS = ("x", "gates")
    WRITES = ("out",)

    x: str
    gates: str
    out: str
    softplus: bool = False

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.elementwise import elementwise

        def run(step: Step) -> None:
            names = step.names
            gates = names[self.gates]
            names[self.out] = elementwise.gate_output(names[self.x], gates, softplus=self.softplus)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`. `Heads` lists gates of what grouped attention gives."""
        to.need("OpKind.kGate", "gates of something else than attention")
        x, gates, out = to.read(at, self.x)[0], to.read(at, self.gates)[0], to.out(to.written(at))
        own = {"width": x.value.width, "softplus": int(self.softplus)}
        to.emit("Gate", x=x, gates=gates, out=out, **own)


@dataclass(frozen=True, slots=True)
class TakeGates(Op):
    """Gates of what latent attention gives, one for each element: the last elements of each head of x, or the only one
    of a head for all of its.
    """

    READS = ("x",)
    WRITES = ("out",)

    x: Read
    out: str
    heads: int
    width: int
    """Elements of a head's output."""

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        read = at.reader(self.x)

        def run(step: Step) -> None:
            gates = read(step.names).unflatten(1, (self.heads, -1))[..., -self.width :]
            step.names[self.out] = gates.expand(-1, -1, self.width).flatten(1)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        (x, column, width), out = to.read(at, self.x), to.out(to.written(at))
        step = width // self.heads
        first = max(0, step - self.width)
        own = {"width": self.width, "groups": self.heads, "step": step, "spread": int(step == 1)}
        to.emit("Copy", x=x, column=column + first, out=out, out_column=0, **own)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.heads * self.width

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{self.width} for each of {self.heads} heads"


@dataclass(frozen=True, slots=True)
class SparseGates(Op):
    """The gates of x's first half of which all but the largest become 0; ranks have shares of them."""

    READS = ("x",)
    WRITES = ("out",)

    x: str
    out: str
    sparsity: float

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .....ops.elementwise.sparse_gates import sparse_gates as with_sparse_gates

        model = at.model

        def run(step: Step) -> None:
            step.names[self.out] = with_sparse_gates(step.names[self.x], self.sparsity, model.ranks)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        from .....ops.elementwise.sparse_gates import deviations

        if to.has_ranks:
            raise NoNativeOp("sparse gate of which ranks have shares")
        x, out = to.read(at, self.x)[0], to.out(to.written(at))
        to.emit("SparseGates", x=x, size=x.value.width // 2, out=out, deviations=deviations(self.sparsity))
