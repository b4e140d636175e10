"""Builders of layers with short convolutions beside attention.

Tests: tests/core/model/program/test_builder.py, tests/core/layers/test_stream_convs.py,
tests/core/layers/test_convolved_heads.py
"""

from __future__ import annotations

from ....memory.pages.projections import Group
from ....ops.mixers.conv_place import ConvPlace
from ..specs.attention import AttentionSpec
from ..specs.feed_forward import Experts, UngatedActivation
from ..specs.head_conv import HeadConvSpec
from ..specs.layers import LayerSpec
from ..specs.norms import NormSpec
from ..specs.stream_convs import StreamConvSpec
from .builder import Kept, LayerBuilder, LayerProgram
from .factor_ops import AddScaled, CarryRouted
from .inkling_ops import ConvolveStream
from .ops import ROUTED, STREAM, Activate, AllReduce, Begin, Concat, End, Heads, Mix, Norm, Op, Read, View


class ConvBuilder(LayerBuilder):
    """Appends the ops of a layer with `StreamConvSpec`.

    Convolutions and attention read the past, so the program has a part that ends with each of them.
    """

    def __init__(self, spec: LayerSpec, norm: NormSpec, convs: StreamConvSpec) -> None:
        super().__init__(spec, norm)
        self._convs = convs

    def build(self) -> None:
        """See `LayerBuilder.build`."""
        mixer, hidden = self.spec.attention, self._convs.hidden
        assert mixer is not None, "layers with convolutions have attention"
        self._inputs(mixer, self._normed(STREAM, "attention_norm"))
        self._keys_and_values(mixer)
        self._queries(mixer)
        self._cut(self._attend(mixer), Kept("a", (mixer.num_heads, mixer.attended_dim)))
        self._attended(mixer)
        y = self._output(self._put(AllReduce(self._project(mixer))), "attention_out_norm")
        self.reads = [Kept(y, (hidden,))]
        self._cut(self._convolution(y, "c", hidden, ConvPlace.ATTENTION), Kept("c", (hidden,)))
        self._add("c")
        self._ops.append(Begin("mlp"))
        y = self._output(self._feed_forward(self._normed(STREAM, "mlp_norm")), "mlp_out_norm")
        self._ops.append(End())
        self.reads = [Kept(y, (hidden,))]
        self.parts[1].append(self._convolution(y, "c", hidden, ConvPlace.FEED_FORWARD))
        self.mixed = [Kept("c", (hidden,))]
        self._ops = self.parts[2]
        self._add("c")
        self._at_end()

    def _keys_and_values(self, mixer: AttentionSpec) -> None:
        """Convolve keys and values before attention's heads are made of them."""
        first, kept = mixer.q_rows, 2 * mixer.kv_size
        own = mixer.projections(self._convs.hidden)
        width = sum(each.outputs for each in own if each.group is Group.MIXER_IN)
        self.reads = [Kept("in", (width,))]
        rows = View("in", first, first + kept)
        self._cut(self._convolution(rows, "kv", kept, ConvPlace.KEYS_AND_VALUES), Kept("kv", (kept,)))
        self._put(Concat((View("in", 0, first), "kv", View("in", first + kept)), "in"))

    def _convolution(self, x: Read, out: str, width: int, place: ConvPlace) -> ConvolveStream:
        return ConvolveStream(x, out, width, place, self._convs)

    def _cut(self, op: Op, *mixed: Kept) -> None:
        """End a part of the program with what reads the past."""
        self.earlier = LayerProgram(tuple(self.parts[0]), (op,), (), tuple(self.reads), mixed, self.earlier)
        self.parts, self.reads = ([], [], []), []
        self._ops = self.parts[0]


#: The learned factors where a part is added, by the gates that other layers have there.
_SCALES = {"attention_gate": "attention_residual", "mlp_gate": "mlp_residual"}


class ConvolvedBuilder(LayerBuilder):
    """Appends the ops of a layer with `HeadConvSpec`: its convolutions and attention are apart, so the program has two
    parts.

    A small network stands before the router of its mixture of experts: see `Experts.router_size`.
    """

    def __init__(self, spec: LayerSpec, norm: NormSpec, convolved: HeadConvSpec) -> None:
        super().__init__(spec, norm)
        self._convolved = convolved

    def _queries(self, mixer: AttentionSpec) -> None:
        given = Kept("qkv", (self._convolved.out_size,))
        first = Mix("in", given.name, self._convolved)
        reads = (Kept("in", (self._convolved.in_size,)),)
        self.earlier = LayerProgram(tuple(self.parts[0]), (first,), (), reads, (given,))
        self.parts = [], [], []
        self._ops = self.parts[0]
        self._put(Heads(given.name, "q", None, mixer, self.norm))
        self.reads.append(Kept("q", (mixer.num_heads, mixer.query_dim)))

    def _add(self, y: str, gate: str = "") -> None:
        if not self.spec.scales_residual:
            super()._add(y, gate)
            return
        self._put(AddScaled(STREAM, y, _SCALES[gate]))

    def _experts(self, spec: Experts, rows: str, out: str, routed: str | None = None) -> str:
        return super()._experts(spec, rows, out, self._routed(rows) if spec.router_size else routed)

    def _routed(self, rows: str) -> str:
        """The name of the rows for the router: what a small network makes of these rows and the layer before."""
        low = self._gemm(Group.ROUTER_DOWN, rows, "rl")
        before, weight = (ROUTED, "routed_scale") if self.spec.takes_routed else (None, None)
        low = self._put(CarryRouted(low, before, weight))
        found = self._put(Norm(low, "rn", "routed_norm", self.norm))
        for group in (Group.ROUTER_FIRST, Group.ROUTER_SECOND):
            found = self._put(Activate(self._gemm(group, found, "rh"), "rh", UngatedActivation.GELU))
        return found
