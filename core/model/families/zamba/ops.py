"""A copy of the embeddings, which shared blocks read (Zamba).

Tests: tests/core/layers/test_shared_blocks.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.layer_program import Kept
from ...program.op import EMBEDDED, STREAM, Op

if TYPE_CHECKING:
    from ...program.lowering import Lowering
    from ...program.torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class CopyEmbeddings(Op):
    """A copy of x, which all layers may read."""

    READS = ("x",)
    WRITES = ("out",)

    x: str = STREAM
    out: str = EMBEDDED

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""

        def run(step: Step) -> None:
            x = step.names[self.x]
            memory = step.kept.get(Kept(self.out, (x.shape[1],)))
            step.names[self.out] = x.clone() if memory is None else memory.copy_(x)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`. The first layer's ops begin with it."""

    def detail(self) -> str:
        """See `Op.detail`."""
        return "for layers with a block, which read the embeddings again"
