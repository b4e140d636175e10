"""What stands behind all layers.

Tests: tests/core/model/program/test_ends.py, tests/core/model/program/test_logits.py
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING

from ..op import Op

if TYPE_CHECKING:
    from torch import Tensor

    from ..torch_step import OpContext, Run, Step


class Rows(Enum):
    """Which of a step's tokens."""

    LOGITS = auto()
    """Those that have logits."""

    KEPT = auto()
    """Those whose final states are kept: for logits of prompts, and for pooling."""


@dataclass(frozen=True, slots=True)
class Select(Op):
    """Of each buffer, the rows of some tokens."""

    READS = ("parts",)
    WRITES = ("parts",)

    parts: tuple[str, ...]
    rows: Rows

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            tokens = step.batch.logit_tokens if self.rows is Rows.LOGITS else step.batch.kept_tokens
            if tokens is not None:  # else all tokens have logits
                step.names |= {each: step.names[each][tokens] for each in self.parts}

        return run

    def detail(self) -> str:
        """See `Op.detail`."""
        return "rows of tokens that have logits"


@dataclass(frozen=True, slots=True)
class Logits(Op):
    """`out = x · wᵀ + bias` in float32, and what adapters add. Each TP rank has columns of its own."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight", "bias")

    x: str
    out: str
    vocab: int
    """Columns of all ranks."""

    weight: str = "head"
    bias: str | None = None

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        import torch

        from ..torch_gemm import backend_for, multiply

        index, model = at.index, at.model

        def run(step: Step) -> None:
            names, weights = step.names, step.layers[index]
            x, weight, memory = names[self.x], weights[self.weight], names.get(self.out)
            backend = backend_for(step.batch.backends, weight, is_head=True)
            if memory is not None and memory.dtype == x.dtype and step.added_logits is None:
                names[self.out] = multiply(backend, x, weight, out=memory)  # nothing is added: see `logits_dtype`
                return
            found = multiply(backend, x, weight)
            is_wide = memory is not None and memory.dtype == torch.float32
            found = memory.copy_(found) if memory is not None and is_wide else found.float()
            if step.added_logits is not None:
                ranks = model.ranks
                step.added_logits(found, x, 0 if ranks is None else self.vocab * ranks.rank // ranks.size)
            if self.bias is not None:
                found.add_(weights[self.bias])
            names[self.out] = found

        return run


@dataclass(frozen=True, slots=True)
class Cap(Op):
    """`x = cap · tanh(x · scale / cap)`; without a cap, x is scaled."""

    READS = ("x",)
    WRITES = ("x",)

    x: str
    scale: float = 1.0
    cap: float | None = None

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            step.names[self.x] = capped(step.names[self.x], self)

        return run

    def detail(self) -> str:
        """See `Op.detail`."""
        scale = "" if self.scale == 1.0 else f"times {self.scale:g}"
        cap = "" if self.cap is None else f"soft cap {self.cap:g}"
        return ", ".join(each for each in (scale, cap) if each)


def capped(logits: Tensor, op: Cap) -> Tensor:
    """Scale and cap logits in place."""
    if op.scale != 1.0:
        logits.mul_(op.scale)
    return logits if op.cap is None else logits.div_(op.cap).tanh_().mul_(op.cap)
