"""DiffLlama: the difference of pairs of heads.

Tests: tests/core/layers/test_differences.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ...compose.attention import attend, heads, heads_in, project
from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...program.op import View
from ...program.ops.heads import ResizeHeads
from ...specs.attention import AttentionSpec
from ...weights.slot import SlotTensor
from .ops import DifferenceSpec, SubtractHeads


@dataclass(frozen=True, kw_only=True)
class DiffLlamaLayer(DecoderLayer):
    """See `DifferenceSpec`."""

    WHY_WHOLE = "heads are subtracted from others, which other ranks would have"

    difference: DifferenceSpec

    def attention_in(self, b: Build, a: AttentionSpec, n: Value) -> Value:
        """Heads of keys have pairs of values, and queries and keys as many elements."""
        spec, kv = self.difference, a.num_kv_heads
        key, wide, count = spec.key_dim, a.head_dim, a.num_heads + kv
        x = b.linear("qkv", n, "in", *heads_in(a, key=key, value=a.value_dim))
        rows = b.put(ResizeHeads(View(x, 0, count * key), "qk", 0, key, wide), count * wide)
        values = b.put(ResizeHeads(View(x, count * key), "v", 0, key, key, spec.pairs(kv)), kv * wide)
        return b.concat("in", rows, values)

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        spec, q = self.difference, heads(b, a, x)[0]
        factors = (f"self_attn.lambda_{each}" for each in ("q1", "k1", "q2", "k2"))
        b.weight("difference", *(SlotTensor(each, (spec.key_dim,)) for each in factors))
        found = attend(b, a, q)
        return project(b, a, b.put(SubtractHeads(found, found, a, spec, b.norm_spec.eps), found.width // 2))
