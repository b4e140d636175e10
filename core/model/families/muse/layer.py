"""Muse Spark: norms of heads' outputs, gated additions, and norms of parts that are scaled first.

Tests: tests/core/layers/test_gated_residual.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...compose.attention import attend, gated, heads, project
from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...program.ops.norm import Norm
from ...specs.attention import AttentionSpec
from ...weights.slot import Keep
from .ops import AddGated, NormHeads, NormScaled

#: Parts by the norm of what they give: the slot of a gate, and the path.
_GATES = {
    "attention_out_norm": ("attention_gate", "post_attention_residual_gate.gate"),
    "mlp_out_norm": ("mlp_gate", "post_feedforward_residual_gate.gate"),
}


@dataclass(frozen=True, kw_only=True)
class MuseLayer(DecoderLayer):
    """Norms of what parts give have an eps of their own."""

    out_eps: float

    head_eps: float | None = None
    """Of the norm of each head's output, without weights, before gates; None: there is none, nor what is below."""

    temperature: float | None = None
    """The residual stream and what parts add have learned factors, see `AddGated`. With norms without weights:

        x += bare(mixer(norm(x))); x += bare(w · feed_forward(norm_2(x)))
    """

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        if self.head_eps is None:
            return super().attention_out(b, a, x, n)
        q, gates = heads(b, a, x)
        found, width = attend(b, a, q), a.attended_dim
        found = b.put(NormHeads(found, "a", width, self.head_eps), a.num_heads, width)
        return project(b, a, gated(b, a, found, gates))

    def out_norm(self, b: Build, name: str, y: Value) -> Value:
        """See `DecoderLayer.out_norm`."""
        norm, is_spark = replace(b.norm_spec, eps=self.out_eps), self.temperature is not None
        is_bare = is_spark and name == "attention_out_norm"
        b.norm_weight(name, b.hidden, replace(norm, weightless=norm.weightless or is_bare), name)
        is_scaled = is_spark and name == "mlp_out_norm"
        return b.put(NormScaled(y, y, name, norm.eps) if is_scaled else Norm(y, y, name, norm), b.hidden)

    def add(self, b: Build, name: str, y: Value) -> None:
        """See `DecoderLayer.add`."""
        if self.temperature is None:
            super().add(b, name, y)
            return
        slot, path = _GATES[name]
        b.put(AddGated(b.x, y, b.vector(slot, path, b.hidden, Keep.FLOAT32), self.temperature), b.hidden)
