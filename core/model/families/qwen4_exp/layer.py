"""Qwen4-Exp: parts take the mean of several gated residual streams and give to them; a table of n-grams adds to them.

Tests: tests/core/layers/test_gated_streams.py
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from ...compose.build import Build, Proj, Value
from ...compose.decoder_layer import DecoderLayer
from ...program.op import STREAMS, View
from ...program.ops.hyper import CopyToStreams, GiveToStreams
from ...program.ops.mix import Mix
from ...program.ops.residual import Replace
from ...program.ops.rows import Scale
from ...weights.layer_weights import PartWeights
from ...weights.slot import Keep, SlotTensor
from ...weights.slots import LOOKUP, LOOKUP_TABLE
from .ngrams import FACTORS, TABLE, NgramSpec
from .ops import AddToStreams, GateLookup, LookUp, MeanOfGated, NormStreams, StreamNumbers

#: The beginning of the slots of what takes of the streams.
_SLOTS = {"attn": "streams_mixer_streams", "mlp": "streams_mlp_streams", "join": "streams_join"}


@dataclass(frozen=True, slots=True)
class GatedStreamsSpec:
    """The residual is several streams s of one width, which are equal before the layers (Qwen4-Exp).

    For each part f of a layer, where n is the norm of each stream by itself, with weights of all streams:

        gates = sigmoid(up(silu(down(n) / count)))      of each element of n
        give = 2 · sigmoid(inject(n) / count)           a number for each stream
        s += give ⊗ f(mean(gates · n))

    Such a mean is also what is left behind all layers, in place of a norm.
    """

    count: int

    rank: int
    """Width between down and up."""

    def num_weights(self, hidden: int, layers: int) -> int:
        """Weights of the model's own matrices: none, as all are projections of layers."""
        del hidden, layers
        return 0


@dataclass(frozen=True, kw_only=True)
class GatedStreamsLayer(DecoderLayer):
    """See `GatedStreamsSpec` and `NgramSpec`."""

    WHY_WHOLE = "gates of several streams and tables of n-grams are made of all streams"

    gates: GatedStreamsSpec
    table: NgramSpec | None = None

    joins: bool = False
    """The streams are joined behind it: the last layer does that."""

    @property
    def streams(self) -> GatedStreamsSpec:
        """See `LayerSpec.streams`."""
        return self.gates

    @property
    def lookup(self) -> NgramSpec | None:
        """See `LayerSpec.lookup`."""
        return self.table

    def begin(self, b: Build) -> None:
        """See `LayerSpec.begin`. The last layer joins the streams."""
        b.put_all(CopyToStreams(self.gates.count), b.lasting(STREAMS, self.gates.count, b.hidden))

    def build(self, b: Build) -> None:
        """See `DecoderLayer.build`."""
        if self.table is not None:
            self._look_up(b, self.table)
        b.put(GiveToStreams(self.mixed(b, self._taken(b, "attn")), "give"))
        with b.span("mlp"):
            y = self.part(b, self._taken(b, "mlp"))
        b.put(GiveToStreams(y, "give"))
        if self.joins:
            b.put(Replace(b.x, self._taken(b, "join")), b.hidden)

    def _taken(self, b: Build, part: str) -> Value:
        """The mean of all gated streams; but for what joins them, with the numbers by which it is given back."""
        own, gives, path = self.gates, part != "join", f"streams.{part}"
        width = own.count * b.hidden
        norm = b.vector(f"{part}_streams_norm", f"{path}_norm.weight", width)
        n = b.put(NormStreams("hn", norm, b.norm_spec), width)
        give = (Proj(f"{path}_give", own.count),) if gives else ()
        found = b.linear(f"{_SLOTS[part]}_down", n, "hd", Proj(f"{path}_down", own.rank), *give, merges=False)
        low = b.put(Scale(View(found, 0, own.rank, copied=True), "hl", 1 / own.count), own.rank)
        low = b.gate(low, low)  # that is silu
        if gives:
            numbers = Value("give", own.count, kind="wide")
            b.put_all(StreamNumbers(View(found, own.rank), numbers, own.count), numbers)
        up = b.linear(f"{_SLOTS[part]}_up", low, "hu", Proj(f"{path}_up", width), merges=False)
        return b.put(MeanOfGated(up, n, "p", own.count), b.hidden)

    def _look_up(self, b: Build, spec: NgramSpec) -> None:
        """Add a table's rows to the streams."""
        for path, tensor in spec.tensors.items():
            b.weight(f"{LOOKUP}.{path}", SlotTensor(path, tensor.shape), keep=Keep.FLOAT32)
        b.part(LOOKUP, partial(_lookup_weights, spec))
        b.weight(LOOKUP_TABLE, SlotTensor(TABLE, spec.table_shape), keep=Keep.TABLE)
        e = b.put(LookUp("e", spec), spec.width)
        key, value = Proj("ple.key_proj", spec.channels), Proj("ple.value_proj", b.hidden)
        kv = b.linear("lookup_in", e, "kv", key, value, merges=False)
        for name in ("norm_key", "norm_query", "norm_conv"):
            b.vector(f"lookup_{name}", f"ple.{name}.weight", self.gates.count * b.hidden)
        taken, normed = Value("gv", spec.channels), Value("gn", spec.channels)
        b.put_all(GateLookup(kv, taken, normed, b.norm_spec), taken, normed)
        b.put(AddToStreams(taken, b.put(Mix(normed, "pc", spec, weights=LOOKUP), spec.channels)))


def _lookup_weights(spec: NgramSpec, of: PartWeights) -> Any:
    """With the factors of tokens in hashes that a checkpoint has beside its table, if it has them."""
    factors = of.beside(TABLE, "ngram_embedding", "layer_multipliers")
    return spec.weights({**of.own, **({} if factors is None else {FACTORS: factors.long()})})
