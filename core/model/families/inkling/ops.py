"""Short convolutions of streams, states of queries that numbers of distances are made of, and the mixture of experts
and of sinks (Inkling).

Tests: tests/core/layers/test_stream_convs.py, tests/core/layers/test_relative_attention.py,
tests/core/layers/test_sink_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .....ops.mixers.conv_place import ConvPlace
from ...program.layer_program import Kept
from ...program.op import Op, Read
from ...program.ops.moe import chosen_of
from ...specs.attention import AttentionSpec
from .experts import SinkExperts
from .stream_convs import StreamConvSpec

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


@dataclass(frozen=True, slots=True)
class ConvolveStream(Op):
    """`out = x + conv(x)`; the sequences' states go on."""

    READS = ("x",)
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("weights",)
    LACKS = "short convolution of a stream"

    x: Read
    out: str
    width: int
    place: ConvPlace
    convs: StreamConvSpec
    weights: str = "recurrent"

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...nvtx_spans import span

        read, index, kept, model = at.reader(self.x), at.index, Kept(self.out, (self.width,)), at.model

        def run(step: Step) -> None:
            states = step.states
            if states is None:
                raise RuntimeError(f"layer {index} has convolutions, and the step has no states for them")
            with span("recurrent.run"):
                y = states.mix(index, read(step.names), at.weights[self.weights].by_place[self.place], model.ranks)
            out = step.kept.get(kept)
            step.names[self.out] = y if out is None else out.copy_(y)

        return run

    def detail(self) -> str:
        """See `Op.detail`."""
        return f"{self.place}, {self.convs.described()}"


@dataclass(frozen=True, slots=True)
class TakeRelative(Op):
    """Relative states `[tokens, heads · dim]` of columns of x, with the log-n scaling of queries."""

    READS = ("x",)
    WRITES = ("out",)
    LACKS = "relative attention by learned vectors"

    x: Read
    out: str
    attention: AttentionSpec

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...program.torch_heads import log_scaling

        read, scaling, heads = at.reader(self.x), log_scaling(self.attention, at.model), self.attention.num_heads

        def run(step: Step) -> None:
            x = read(step.names)
            if scaling is not None:
                x = (x.unflatten(1, (heads, -1)) * scaling[step.batch.positions]).flatten(1).to(x.dtype)
            step.names[self.out] = x

        return run
