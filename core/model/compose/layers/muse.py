"""Muse Spark: norms of heads' outputs, gated additions, and norms of parts that are scaled first.

Tests: tests/core/layers/test_gated_residual.py
"""

from __future__ import annotations

from dataclasses import replace

from ...program.ops.norm import Norm, NormHeads, NormScaled
from ...program.ops.residual import AddGated
from ...specs.attention import AttentionSpec
from ...weights.slot import Keep
from ..attention import attend, gated, heads, project
from ..build import Build, Value
from .decoder import DecoderLayer

#: Parts by the norm of what they give: the slot of a gate, and the path.
_GATES = {
    "attention_out_norm": ("attention_gate", "post_attention_residual_gate.gate"),
    "mlp_out_norm": ("mlp_gate", "post_feedforward_residual_gate.gate"),
}


class MuseLayer(DecoderLayer):
    """See `LayerSpec.scales_first`, `residual_temperature` and `out_eps`, and `AttentionSpec.head_out_eps`."""

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        if a.head_out_eps is None:
            return super().attention_out(b, a, x, n)
        q, gates = heads(b, a, x)
        found, width = attend(b, a, q), a.attended_dim
        found = b.put(NormHeads(found, "a", width, a.head_out_eps), a.num_heads, width)
        return project(b, a, gated(b, a, found, gates))

    def out_norm(self, b: Build, name: str, y: Value) -> Value:
        """See `DecoderLayer.out_norm`."""
        norm = b.norm_spec if self.spec.out_eps is None else replace(b.norm_spec, eps=self.spec.out_eps)
        is_bare = self.spec.scales_first and name == "attention_out_norm"
        b.norm_weight(name, b.hidden, replace(norm, weightless=norm.weightless or is_bare), name)
        is_scaled = self.spec.scales_first and name == "mlp_out_norm"
        return b.put(NormScaled(y, y, name, norm.eps) if is_scaled else Norm(y, y, name, norm), b.hidden)

    def add(self, b: Build, name: str, y: Value) -> None:
        """See `DecoderLayer.add`."""
        if (temperature := self.spec.residual_temperature) is None:
            super().add(b, name, y)
            return
        slot, path = _GATES[name]
        b.put(AddGated(b.x, y, b.vector(slot, path, b.hidden, Keep.FLOAT32), temperature), b.hidden)
