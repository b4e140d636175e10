"""BitNet: norms inside of attention and of the feed-forward part.

Tests: tests/core/layers/test_inner_norms.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ...compose.attention import attend, heads, project
from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.parts import activated, down, gate_up
from ...specs.attention import AttentionSpec
from ...specs.feed_forward import GatedSpec, UngatedSpec


@dataclass(frozen=True)
class BitNetLayer(DecoderLayer):
    """What o_proj and down_proj read is normalised: of all heads of a token at once, and of all of the part."""

    WHY_WHOLE = "norms inside of attention and of feed-forward parts are of what all ranks have together"

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        q, _ = heads(b, a, x)
        found = Value(attend(b, a, q), a.out_size)
        return project(b, a, b.norm("attention_inner_norm", found, found, path="self_attn.attn_sub_norm"))

    def dense_part(self, b: Build, spec: GatedSpec | UngatedSpec, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        f = activated(b, spec, gate_up(b, spec, rows))
        return down(b, spec, b.norm("mlp_inner_norm", f, f, path="mlp.ffn_sub_norm"))
