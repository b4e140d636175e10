"""Hyper-connections: parts take of several residual streams, and give to them (HY V4, GLM-5.3-Flash).

Tests: tests/core/layers/test_hyper_connections.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ...program.ops.hyper import ConnectStreams, GiveToStreams, SumStreams
from ...specs.hyper_connections import HyperConnectionSpec
from ...weights.slot import Keep, SlotTensor
from ...weights.slots import CONNECTIONS
from ..build import Build, Value
from .decoder import DecoderLayer


@dataclass(frozen=True, kw_only=True)
class HyperConnectedLayer(DecoderLayer):
    """See `HyperConnectionSpec`. The streams, and the numbers by which the mixer gives to them, live across it."""

    connections: HyperConnectionSpec

    @property
    def streams(self) -> HyperConnectionSpec:
        """See `LayerSpec.streams`."""
        return self.connections

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
        own, slots = self.connections, CONNECTIONS[part]
        ends = {"fn": (own.rows, own.count * b.hidden), "base": (own.rows,), "scale": (own.scales,)}
        for name, (end, shape) in zip(slots, ends.items(), strict=True):
            b.weight(name, SlotTensor(f"{part}.{end}", shape), keep=Keep.FLOAT32)
        take, give = (Value(name, own.count, kind="wide") for name in ("take", "give"))
        mix = Value("mix", own.count**2, kind="wide") if own.rounds else None
        b.put_all(ConnectStreams(own, *slots, take, give, mix), take, give, *(() if mix is None else (mix,)))
        return b.put(SumStreams("p", take), b.hidden), mix
