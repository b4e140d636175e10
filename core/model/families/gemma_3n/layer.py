"""Gemma 3n: the residual is several streams, which a layer predicts and corrects (AltUp).

Tests: tests/core/layers/test_streams.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ...compose.build import Build, Proj, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.parts import activated, down, gate_up, per_layer_part
from ...program.op import STREAMS
from ...program.ops.gates import SparseGates
from ...program.ops.residual import Add
from ...program.ops.rows import Scale
from ...specs.feed_forward import GatedSpec, UngatedSpec
from ...weights.slot import Keep, SlotTensor
from .ops import (
    AddToOthers,
    CorrectStreams,
    JoinStreams,
    PredictStreams,
    SplitStreams,
    StreamFactors,
    TakeStream,
)


@dataclass(frozen=True, slots=True)
class AltUpSpec:
    """The residual is several streams of one width: a layer computes one of them, and predicts and corrects the others
    (AltUp, arXiv 2301.13310; Gemma 3n). See `Gemma3nLayer`.
    """

    count: int

    active: int
    """The stream that layers compute."""

    rank: int
    """Width between the two matrices of what a layer adds beside attention, `n + norm(up(down(n)))` of attention's
    input n (LAuReL, arXiv 2411.07501).
    """

    scaled: bool = True
    """The active stream is multiplied by learned numbers where it gates the layer's embedding."""

    def num_weights(self, hidden: int, layers: int) -> int:
        """Weights of the model's own matrices."""
        del layers
        return 2 * (self.count - 1) * hidden**2


@dataclass(frozen=True, kw_only=True)
class Gemma3nLayer(DecoderLayer):
    """See `AltUpSpec`. All streams are predicted from all, by factors that are made of the active one.

    The layer's parts take and give the active one, and by what they changed of it, all are corrected:

        s += prediction(s_active) · s
        o = (p + norm(mixer(n)) + n + norm(up(down(n)))) / √2, with p = s_active and n = norm(p)
        o += norm(feed_forward(norm(o)))
        s += (1 + correction(o)) ⊗ (o - p)

    The layer's embedding then adds to all streams but the first. p and n are made again behind the mixer, so that only
    the streams live across it.
    """

    altup: AltUpSpec

    per_layer_size: int
    """See `PerLayerEmbeddingSpec.size`."""

    sparsity: float = 0.0
    """Share of a token's gates that become 0 if they are normally distributed: those below the cutoff of that share,
    which is subtracted from the others. 0: none.
    """

    @property
    def streams(self) -> AltUpSpec:
        """See `LayerSpec.streams`."""
        return self.altup

    def begin(self, b: Build) -> None:
        """See `LayerSpec.begin`."""
        made = self._others(b, "stream_in_{}", "altup_projections.{}.weight")
        b.put_all(SplitStreams(made), b.lasting(STREAMS, self.altup.count, b.hidden))

    def finish(self, b: Build) -> None:
        """See `LayerSpec.finish`."""
        b.put(JoinStreams(self._others(b, "stream_out_{}", "altup_unembed_projections.{}.weight")), b.hidden)

    def _others(self, b: Build, slot: str, path: str) -> tuple[str, ...]:
        """The matrices of all streams but the first."""
        return tuple(
            b.weight(slot.format(at), SlotTensor(path.format(at - 1), (b.hidden, b.hidden)), keep=Keep.WHOLE)
            for at in range(1, self.altup.count)
        )

    def build(self, b: Build) -> None:
        """See `DecoderLayer.build`."""
        own = self.altup
        b.put(PredictStreams(self._factors(b, self._taken(b), "prediction", own.count**2)))
        y = self.mixed(b, self.normed(b, "attention_norm", self._taken(b)))
        p = self._taken(b)
        o = b.sum(p, self.out(b, "attention_out_norm", y), "o")
        self._low_rank(b, own, p, o)
        y = self.out(b, "mlp_out_norm", self.part(b, self.normed(b, "mlp_norm", o)))
        b.put(Add(o, y), b.hidden)
        b.put(CorrectStreams(self._factors(b, o, "correction", own.count), o, p))
        p = self._taken(b)
        b.vector("stream_scale", "altup.correct_output_scale", b.hidden, Keep.PLAIN if own.scaled else Keep.UNUSED)
        if own.scaled:
            p = b.put(Scale(p, p, weight="stream_scale"), b.hidden)
        b.put(AddToOthers(per_layer_part(b, self, self.per_layer_size, p)))

    def dense_part(self, b: Build, spec: GatedSpec | UngatedSpec, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        gu = gate_up(b, spec, rows)
        if self.sparsity:
            b.put(SparseGates(gu, gu, self.sparsity), gu.width)
        return down(b, spec, activated(b, spec, gu))

    def _taken(self, b: Build) -> Value:
        """The active stream."""
        return b.put(TakeStream("p", self.altup.active), b.hidden)

    def _factors(self, b: Build, x: Value, name: str, rows: int) -> Value:
        """Factors of streams, which are made of x."""
        count = self.altup.count
        b.weight("stream_router", SlotTensor("altup.modality_router.weight", (count, b.hidden)))
        b.vector("stream_router_norm", "altup.router_norm.weight", b.hidden, factor=b.hidden**-1.0)
        slot = b.weight(f"stream_{name}", SlotTensor(f"altup.{name}_coefs.weight", (rows, count)))
        return b.put(StreamFactors(x, "c", slot, b.norm_spec, rows), rows)

    def _low_rank(self, b: Build, own: AltUpSpec, p: Value, o: Value) -> None:
        """Add what is added beside attention; see `AltUpSpec.rank`."""
        n = self.normed(b, "attention_norm", p)
        low = b.linear("low_rank_down", n, "l", Proj("laurel.linear_left", own.rank), merges=False)
        low = b.linear("low_rank_up", low, "l", Proj("laurel.linear_right", b.hidden), merges=False)
        low = b.sum(n, b.norm("low_rank_norm", low, "l", path="laurel.post_laurel_norm"), "l")
        b.put(Add(o, low), b.hidden)
        b.put(Scale(o, o, 2**-0.5, in_place=True), b.hidden)
