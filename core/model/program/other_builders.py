"""Builders of layers whose residual is several streams, and of those behind a block that layers share.

Tests: tests/core/model/program/test_builder.py, tests/core/layers/test_hyper_connections.py,
tests/core/layers/test_shared_blocks.py
"""

from __future__ import annotations

from ....memory.pages.projections import Group
from ..specs.hyper_connections import HyperConnectionSpec
from ..specs.layers import LayerSpec, StreamsSpec
from ..specs.norms import NormSpec
from ..specs.shared_block import SharedBlock
from ..weights.slots import CONNECTIONS
from .builder import Kept, LayerBuilder, LayerProgram
from .hyper_ops import ConnectStreams, GiveToStreams, SumStreams
from .ops import EMBEDDED, STREAM, Add, AllReduce, Attend, Begin, Concat, End, Mix, Norm, Scale, Sum, View
from .stream_ops import AddToOthers, CorrectStreams, PredictStreams, StreamFactors, TakeStream


class StreamBuilder(LayerBuilder):
    """Appends the ops of a layer whose residual is several streams (AltUp, Gemma 3n).

    All streams are predicted from all, by factors that are made of the active one. The layer's parts take and give the
    active one, and by what they changed of it, all are corrected:

        s += prediction(s_active) · s
        o = (p + norm(mixer(n)) + n + norm(up(down(n)))) / √2, with p = s_active and n = norm(p)
        o += norm(feed_forward(norm(o)))
        s += (1 + correction(o)) ⊗ (o - p)

    The further input then adds to all streams but the first. p and n are made again behind the mixer, so that only the
    streams live across it.
    """

    def __init__(self, spec: LayerSpec, norm: NormSpec, streams: StreamsSpec) -> None:
        super().__init__(spec, norm)
        self._streams = streams

    def build(self) -> None:
        """See `LayerBuilder.build`."""
        mixer, active = self.spec.mixer, self._streams.active
        assert mixer is not None, "layers of several streams have a mixer"
        self._put(TakeStream("p", active))
        self._put(StreamFactors("p", "c", "stream_prediction", self.norm))
        self._put(PredictStreams("c"))
        self._put(TakeStream("p", active))
        self._inputs(mixer, self._normed("p", "attention_norm"))
        y = self._mixed(mixer)
        self._put(TakeStream("p", active))
        self._put(Sum("p", self._output(y, "attention_out_norm"), "o"))
        self._low_rank()
        y = self._output(self._feed_forward(self._normed("o", "mlp_norm")), "mlp_out_norm")
        self._put(Add("o", y))
        self._put(StreamFactors("o", "c", "stream_correction", self.norm))
        self._put(CorrectStreams("c", "o", "p"))
        self._put(TakeStream("p", active))
        if self._streams.scaled:
            self._put(Scale("p", "p", weight="stream_scale"))
        self._put(AddToOthers(self._further("p")))

    def _low_rank(self) -> None:
        """Add what is added beside attention; see `StreamsSpec.rank`."""
        self._put(Norm("p", "n", "attention_norm", self.norm))
        self._gemm(Group.LOW_RANK_DOWN, "n", "l")
        self._gemm(Group.LOW_RANK_UP, "l", "l")
        self._put(Norm("l", "l", "low_rank_norm", self.norm))
        self._put(Sum("n", "l", "l"))
        self._put(Add("o", "l"))
        self._put(Scale("o", "o", 2**-0.5, in_place=True))


class HyperBuilder(LayerBuilder):
    """Appends the ops of a layer whose parts take of several streams, and give to them: see `HyperConnectionSpec`.

    The streams, and the numbers by which the mixer gives to them, live across it.
    """

    def __init__(self, spec: LayerSpec, norm: NormSpec, hyper: HyperConnectionSpec) -> None:
        super().__init__(spec, norm)
        self._hyper = hyper
        self._mix = "mix" if hyper.rounds else None

    def build(self) -> None:
        """See `LayerBuilder.build`."""
        mixer, count = self.spec.mixer, self._hyper.count
        assert mixer is not None, "layers of several streams have a mixer"
        self._inputs(mixer, self._normed(self._taken("attn_hc"), "attention_norm"))
        self.reads.append(Kept("give", (count,), is_wide=True))
        if self._mix is not None:
            self.reads.append(Kept(self._mix, (count**2,), is_wide=True))
        self._given(self._output(self._mixed(mixer), "attention_out_norm"))
        self._ops.append(Begin("mlp"))
        rows = self._normed(self._taken("ffn_hc"), "mlp_norm")
        y = self._output(self._feed_forward(rows), "mlp_out_norm")
        self._ops.append(End())
        self._given(y)

    def _taken(self, part: str) -> str:
        """What a part takes of the streams."""
        self._put(ConnectStreams(self._hyper, *CONNECTIONS[part], take="take", give="give", mix=self._mix))
        return self._put(SumStreams("p", "take"))

    def _given(self, y: str) -> None:
        self._put(GiveToStreams(y, "give", self._mix))


class BlockBuilder(LayerBuilder):
    """Appends the ops of a layer with a block before its mixer: see `SharedBlock`.

    Attention and the mixer are apart, so the program has two parts.
    """

    def __init__(self, spec: LayerSpec, norm: NormSpec, block: SharedBlock) -> None:
        super().__init__(spec, norm)
        self._block = block

    def build(self) -> None:
        """See `LayerBuilder.build`."""
        attention, mixer = self.spec.attention, self._block.mixer
        assert attention is not None, "a block has attention"
        both = self._put(Concat((STREAM, EMBEDDED), "xe"))
        rows = self._put(Norm(both, "n", "block_norm", self.norm))
        self._gemm(Group.MIXER_IN, rows, "in")
        if self._block.heads_rank:
            self._heads_of_place(rows, self._block.heads_rank)
        self._queries(attention)
        attended = Kept("a", (attention.num_heads, attention.attended_dim))
        self.earlier = LayerProgram(
            tuple(self.parts[0]), (Attend("q", attended.name, attention),), (), tuple(self.reads), (attended,)
        )
        self.parts = [], [], []
        self._ops = self.parts[0]
        self._gemm(Group.MIXER_OUT, attended.name, "y")
        self._put(AllReduce("y"))
        self._ops.append(Begin("mlp"))
        y = self._feed_forward(self._normed("y", "mlp_norm"))
        self._ops.append(End())
        self._put(Sum(STREAM, self._gemm(Group.PLACE_OUT, y, "t"), "xt"))
        self._gemm(Group.BESIDE_IN, self._put(Norm("xt", "n", "second_norm", self.norm)), "r")
        self.reads = [Kept("r", (mixer.in_size,))]
        self.parts[1].append(Mix("r", "m", mixer))
        self.mixed = [Kept("m", (mixer.out_size,))]
        self._ops = self.parts[2]
        self._gemm(Group.BESIDE_OUT, "m", "z")
        self._add(self._put(AllReduce("z")))

    def _heads_of_place(self, rows: str, rank: int) -> None:
        """Add the layer's own pairs of small matrices to queries, keys and values."""
        low = self._gemm(Group.PLACE_HEADS_DOWN, rows, "low")
        ups = ((Group.PLACE_QUERY_UP, "qu"), (Group.PLACE_KEY_UP, "ku"), (Group.PLACE_VALUE_UP, "vu"))
        parts = tuple(
            self._gemm(group, View(low, at * rank, (at + 1) * rank, copied=True), out)
            for at, (group, out) in enumerate(ups)
        )
        self._put(Sum("in", self._put(Concat(parts, "low")), "in"))

    def _gate_up(self, rows: str) -> None:
        super()._gate_up(rows)
        if not self._block.mlp_rank:
            return
        low = self._gemm(Group.PLACE_MLP_DOWN, rows, "low")
        self._put(Sum("gu", self._gemm(Group.PLACE_MLP_UP, low, "gl"), "gu"))
