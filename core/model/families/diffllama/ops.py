"""Differences between heads (DiffLlama).

Tests: tests/core/layers/test_differences.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.op import Op
from ...specs.attention import AttentionSpec

if TYPE_CHECKING:
    import torch

    from ...program.lowering import Lowering
    from ...program.torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class DifferenceSpec:
    """Differential attention (arXiv 2410.05258), as transformers' DiffLlama has it.

    Head h of the first half of all heads gives

        (1 - first) · norm(out_h - factor · out_(h + half))

    where `factor = exp(q1 · k1) - exp(q2 · k2) + first`, of four learned vectors, and the norm has no weights. A head's
    value is twice as wide as its key: the values of two heads, as many of them apart as half of all there are. Heads of
    keys take these pairs in turn.
    """

    first: float
    """The factor before training."""

    key_dim: int
    """Elements of a head's query and key; pages have `head_dim`, twice as many, of which the others are zeros."""

    def factor(self, vectors: torch.Tensor) -> torch.Tensor:
        """The factor, by `[4 · key_dim]`: q1, k1, q2 and k2."""
        q1, k1, q2, k2 = vectors.view(4, -1)
        first, second = ((q * k).float().sum().exp().to(vectors.dtype) for q, k in ((q1, k1), (q2, k2)))
        return first - second + self.first

    @staticmethod
    def pairs(kv_heads: int) -> tuple[int, ...]:
        """The projected heads of values in the order in which heads of keys have them, two each."""
        half = kv_heads // 2
        return tuple(number for head in range(kv_heads) for number in (head % half, half + head % half))


@dataclass(frozen=True, slots=True)
class SubtractHeads(Op):
    """The difference of each head of x's first half and one of the second: see `DifferenceSpec`."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("factors",)

    x: str
    out: str
    attention: AttentionSpec
    difference: DifferenceSpec
    eps: float
    factors: str = "difference"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch

        from .....ops.elementwise import elementwise

        spec, width = self.difference, self.attention.head_dim
        factor = spec.factor(at.weights[self.factors])
        weight = torch.ones(width, dtype=factor.dtype, device=factor.device)

        def run(step: Step) -> None:
            first, second = step.names[self.x].flatten(1).unflatten(1, (2, -1, width)).unbind(1)
            y = (first - factor * second).flatten(0, 1)
            y = elementwise.rms_norm(y, weight, self.eps) * (1 - spec.first)
            step.names[self.out] = y.view(len(first), -1)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        import torch

        from ...program.native_binding import weight_of

        to.need("OpKind.kSubtract", "differences between heads")
        (x, column, width), out = to.read(at, self.x), to.out(to.written(at))
        spec, head, vectors = self.difference, self.attention.head_dim, weight_of(self.factors)
        own = {
            "factor": lambda at: float(spec.factor(vectors(at))),
            "weight": torch.full((head,), 1 - spec.first),
            "eps": self.eps,
        }
        to.emit("Subtract", x=x, column=column, heads=width // head // 2, width=head, out=out, **own)

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return given[0] // 2

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"heads less those behind them, each normalised without weights, times {1 - self.difference.first:g}"
