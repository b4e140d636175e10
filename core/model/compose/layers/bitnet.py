"""BitNet: what o_proj reads is normalised, all heads of a token at once.

Tests: tests/core/layers/test_inner_norms.py
"""

from __future__ import annotations

from ...specs.attention import AttentionSpec
from ..attention import attend, heads, project
from ..build import Build, Value
from .decoder import DecoderLayer


class BitNetLayer(DecoderLayer):
    """See `AttentionSpec.inner_norm`."""

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        q, _ = heads(b, a, x)
        found = Value(attend(b, a, q), a.out_size)
        return project(b, a, b.norm("attention_inner_norm", found, found, path="self_attn.attn_sub_norm"))
