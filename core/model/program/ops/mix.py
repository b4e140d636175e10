"""Mixers with states of sequences.

Tests: tests/core/layers/test_hybrids.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...specs.recurrent import RecurrentSpec
from ..layer_program import Kept
from ..op import NoNativeOp, Op, Read

if TYPE_CHECKING:
    from ..lowering import Lowering
    from ..torch_step import OpContext, Run, Step


@dataclass(frozen=True, slots=True)
class Mix(Op):
    """A recurrent mixer, or one of its two parts; the sequences' states go on."""

    READS = ("x",)
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("weights",)

    x: Read
    out: str
    mixer: RecurrentSpec
    weights: str = "recurrent"

    is_first: bool = False
    """It is the first part of a mixer of two: see `RecurrentSpec.inner`."""

    @property
    def out_size(self) -> int:
        """Width of its output."""
        return self.mixer.channels if self.is_first else self.mixer.out_size

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...nvtx_spans import span

        read, index, kept, model = at.reader(self.x), at.index, Kept(self.out, (self.out_size,)), at.model

        def run(step: Step) -> None:
            states = step.states
            if states is None:
                raise RuntimeError(f"layer {index} has a recurrent mixer, and the step has no states for it")
            weights = at.weights[self.weights]
            with span("recurrent.run"):
                y = states.mix(index, read(step.names), weights.first if self.is_first else weights, model.ranks)
            out = step.kept.get(kept)
            step.names[self.out] = y if out is None else out.copy_(y)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        if (lack := self.mixer.no_native) is not None:
            raise NoNativeOp(lack)
        if self.mixer.native_shape() is None:
            raise NoNativeOp(self.mixer.title)
        value = to.written(at)
        out = to.held_as(value) if self.is_first else to.rounded(value)
        own = {"is_first": 1} if self.is_first else {}
        x, weights = to.read(at, self.x)[0], self.weights
        to.emit(
            "Mix",
            x=x,
            out=out,
            state_layer=lambda at: at.state_layer,
            weights=lambda at: at.weights[weights].native_tensors,
            **own,
        )

    def columns(self, given: Sequence[int], to: Lowering) -> int:
        """See `Op.columns`."""
        return self.out_size

    def detail(self) -> str:
        """See `Op.detail`."""
        return self.mixer.described()
