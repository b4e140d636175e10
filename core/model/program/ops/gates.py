"""Gates of outputs, and sparse ones.

Tests: tests/core/layers/test_latent_gates.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..op import Op, Read

if TYPE_CHECKING:
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


@dataclass(frozen=True, slots=True)
class TakeGates(Op):
    """Gates of what latent attention gives, one for each element: the last elements of each head of x, or the only one
    of a head for all of its.
    """

    READS = ("x",)
    WRITES = ("out",)
    LACKS = "gates of what latent attention gives"

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

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{self.width} for each of {self.heads} heads"


@dataclass(frozen=True, slots=True)
class SparseGates(Op):
    """The gates of x's first half of which all but the largest become 0; ranks have shares of them."""

    READS = ("x",)
    WRITES = ("out",)
    LACKS = "sparse gate"

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
