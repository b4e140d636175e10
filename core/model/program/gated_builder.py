"""Builder of layers whose parts take of several streams by gates, and add rows of a table to them.

Tests: tests/core/layers/test_gated_streams.py
"""

from __future__ import annotations

from ....memory.pages.projections import STREAM_GATES, Group
from ..specs.gated_streams import GatedStreamsSpec
from ..specs.layers import LayerSpec
from ..specs.ngrams import NgramSpec
from ..specs.norms import NormSpec
from .builder import Kept, LayerBuilder, LayerProgram
from .gated_ops import AddToStreams, GateLookup, LookUp, MeanOfGated, NormStreams, StreamNumbers
from .hyper_ops import GiveToStreams
from .ops import STREAM, Begin, End, GateOutput, Mix, Replace, Scale, View


class GatedBuilder(LayerBuilder):
    """Appends the ops of a layer whose parts take of several streams, and give to them: see `GatedStreamsSpec`.

    The streams, and the numbers by which the mixer gives to them, live across it. A layer with a table begins with two
    programs more: up to its rows, and up to the convolution of what streams take of them.
    """

    def __init__(self, spec: LayerSpec, norm: NormSpec, streams: GatedStreamsSpec) -> None:
        super().__init__(spec, norm)
        self._streams = streams

    def build(self) -> None:
        """See `LayerBuilder.build`."""
        mixer = self.spec.mixer
        assert mixer is not None, "layers of several streams have a mixer"
        if self.spec.lookup is not None:
            self._look_up(self.spec.lookup)
        self._inputs(mixer, self._taken("attn"))
        self.reads.append(Kept("give", (self._streams.count,), is_wide=True))
        self._put(GiveToStreams(self._mixed(mixer), "give"))
        self._ops.append(Begin("mlp"))
        y = self._feed_forward(self._taken("mlp"))
        self._ops.append(End())
        self._put(GiveToStreams(y, "give"))
        if self.spec.joins:
            self._put(Replace(STREAM, self._taken("join")))

    def _taken(self, part: str) -> str:
        """What a part takes of the streams."""
        count, rank, (down, up) = self._streams.count, self._streams.rank, STREAM_GATES[part]
        n = self._put(NormStreams("hn", f"{part}_streams_norm", self.norm))
        found = self._gemm(down, n, "hd")
        low = self._put(Scale(View(found, 0, rank, copied=True), "hl", 1 / count))
        low = self._put(GateOutput(low, low, "hl"))  # that is silu
        if part != "join":
            self._put(StreamNumbers(View(found, rank), "give", count))
        return self._put(MeanOfGated(self._gemm(up, low, "hu"), n, "p", count))

    def _look_up(self, lookup: NgramSpec) -> None:
        """Add a table's rows to the streams."""
        rows, taken, late = (
            Kept(name, (width,))
            for name, width in (("e", lookup.width), ("gv", lookup.channels), ("pc", lookup.channels))
        )
        first = LayerProgram((), (LookUp(rows.name, lookup),), (), (), (rows,))
        self._gemm(Group.LOOKUP_IN, rows.name, "kv")
        self._put(GateLookup("kv", taken.name, "gn", self.norm))
        mix = Mix("gn", late.name, lookup, weights="lookup")
        reads = (Kept("gn", (lookup.channels,)), taken)
        self.earlier = LayerProgram(tuple(self.parts[0]), (mix,), (), reads, (late,), first)
        self.parts = [], [], []
        self._ops = self.parts[0]
        self._put(AddToStreams(taken.name, late.name))
