"""Hyper-connections: parts take of several residual streams, and give to them (HY V4, GLM-5.3-Flash).

Tests: tests/core/layers/test_hyper_connections.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..program.op import STREAMS
from ..program.ops.hyper import ConnectStreams, CopyToStreams, GiveToStreams, SumStreams
from ..program.ops.residual import Replace
from ..specs.hyper_connections import HyperConnectionSpec
from ..weights.slot import Keep, SlotTensor
from .build import Build, Value
from .decoder_layer import DecoderLayer

#: Slots of the matrix, base and scale of numbers: of a layer's two parts, and of what joins the streams.
_SLOTS = {
    part: (slot, f"{slot}_base", f"{slot}_scale")
    for part, slot in (("attn_hc", "attn_hyper"), ("ffn_hc", "ffn_hyper"), ("hc_head", "hyper_head"))
}


@dataclass(frozen=True, kw_only=True)
class HyperConnectedLayer(DecoderLayer):
    """See `HyperConnectionSpec`. The streams, and the numbers by which the mixer gives to them, live across it."""

    connections: HyperConnectionSpec

    @property
    def streams(self) -> HyperConnectionSpec:
        """See `LayerSpec.streams`."""
        return self.connections

    def begin(self, b: Build) -> None:
        """See `LayerSpec.begin`."""
        count = self.connections.count
        b.put_all(CopyToStreams(count), b.lasting(STREAMS, count, b.hidden))

    def finish(self, b: Build) -> None:
        """See `LayerSpec.finish`."""
        own, take = self.connections, None
        if own.joined:
            take = Value("take", own.count, kind="wide")
            b.put_all(ConnectStreams(own, *_numbers(b, own, "hc_head", "hc_head.hc_", own.count, 1), take=take), take)
        b.put(Replace(b.x, b.put(SumStreams("joined", take), b.hidden)), b.hidden)

    def build(self, b: Build) -> None:
        """See `DecoderLayer.build`."""
        p, mix = self._taken(b, "attn_hc")
        y = self.out(b, "attention_out_norm", self.mixed(b, self.normed(b, "attention_norm", p)))
        b.put(GiveToStreams(y, "give", mix))
        with b.span("mlp"):
            p, mix = self._taken(b, "ffn_hc")
            y = self.out(b, "mlp_out_norm", self.part(b, self.normed(b, "mlp_norm", p)))
        b.put(GiveToStreams(y, "give", mix))

    def _taken(self, b: Build, part: str) -> tuple[Value, Value | None]:
        """What a part takes of the streams, and the numbers by which they mix, if they do."""
        own = self.connections
        slots = _numbers(b, own, part, f"{part}.", own.rows, own.scales)
        take, give = (Value(name, own.count, kind="wide") for name in ("take", "give"))
        mix = Value("mix", own.count**2, kind="wide") if own.rounds else None
        b.put_all(ConnectStreams(own, *slots, take, give, mix), take, give, *(() if mix is None else (mix,)))
        return b.put(SumStreams("p", take), b.hidden), mix


def _numbers(b: Build, own: HyperConnectionSpec, part: str, path: str, rows: int, scales: int) -> tuple[str, str, str]:
    """Declare what numbers of a part are made by; returns the slots of the matrix, base and scale."""
    shapes = {"fn": (rows, own.count * b.hidden), "base": (rows,), "scale": (scales,)}
    for slot, (end, shape) in zip(_SLOTS[part], shapes.items(), strict=True):
        b.weight(slot, SlotTensor(path + end, shape), keep=Keep.FLOAT32)
    return _SLOTS[part]
