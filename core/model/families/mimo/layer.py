"""MiMo-V2: values are narrower than keys, and have a factor.

Tests: tests/core/layers/test_narrow_values.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ...compose.attention import attend, attention_in, gated, heads, project
from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...program.op import View
from ...program.ops.heads import ResizeHeads
from ...program.ops.rows import Scale
from ...specs.attention import AttentionSpec


@dataclass(frozen=True, kw_only=True)
class MiMoLayer(DecoderLayer):
    """See `AttentionSpec.value_dim`. Pages have values as wide as keys."""

    value_factor: float = 1.0
    """Of values, before they are kept."""

    def attention_in(self, b: Build, a: AttentionSpec, n: Value) -> Value:
        """See `DecoderLayer.inputs`."""
        x, first = attention_in(b, a, n), a.q_rows + a.kv_size
        if self.value_factor != 1.0:
            b.put(Scale(View(x, first), x, self.value_factor, in_place=True), x.width)
        return x if a.value_dim is None else b.put(ResizeHeads(x, x, first, a.value_dim, a.head_dim), first + a.kv_size)

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        q, gates = heads(b, a, x)
        found = gated(b, a, attend(b, a, q), gates)
        if a.value_dim is not None:
            found = b.put(ResizeHeads(found, found, 0, a.head_dim, a.value_dim), a.out_size)
        return project(b, a, found)
