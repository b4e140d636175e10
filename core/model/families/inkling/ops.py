"""The mixture of experts and of sinks (Inkling).

Tests: tests/core/layers/test_sink_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.layer_program import Kept
from ...program.op import Op, Read
from ...program.ops.moe import chosen_of
from .experts import SinkExperts

if TYPE_CHECKING:
    from ...program.torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class MoeWithSinks(Op):
    """A mixture of experts, and of sinks: see `SinkExperts`."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("experts", "sinks")
    LACKS = "mixture with experts of all tokens that its router weighs"

    x: Read
    out: str
    spec: SinkExperts
    experts: str = "experts"
    sinks: str = "sink_experts"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from .mixture import mix_with_sinks

        read, index = at.reader(self.x), at.index

        def run(step: Step) -> None:
            weights, lora = step.layers[index], step.batch.lora
            added = None if lora is None else lora.mixture(index)
            y = mix_with_sinks(read(step.names), weights[self.experts], weights[self.sinks], self.spec, added)
            out = step.kept.get(Kept(self.out, y.shape[1:]))
            step.names[self.out] = y if out is None else out.copy_(y)

        return run

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{chosen_of(self.spec, f'{self.spec.size}')}{self.spec.for_all}, which the router weighs, too"
