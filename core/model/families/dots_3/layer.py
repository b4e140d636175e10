"""Dots 3 Note: the key that all heads share is normalised before it is rotated.

Tests: tests/core/layers/test_latent_windows.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.latents import attended, latent_of, latent_queries, parts_of, take_gates
from ...program.op import View
from ...program.ops.norm import Norm
from ...specs.attention import AttentionSpec
from ...specs.norms import NormSpec


@dataclass(frozen=True)
class Dots3Layer(DecoderLayer):
    """See the module."""

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        latent, own = latent_of(a), parts_of(a, x)
        assert own.kept is not None, "a layer has its own keys"
        queries, gates = latent_queries(b, a, own, n), take_gates(b, a, own.gates)
        middle, slot, width = own.kept.begin + latent.kv_rank, "k_rotated_norm", latent.rotated_dim
        b.vector(slot, f"self_attn.{slot}.weight", width)
        key = b.put(Norm(View(x, middle, own.kept.end), "kr", slot, NormSpec(latent.eps)), width)
        return attended(b, a, queries, b.concat("kv", View(x, own.kept.begin, middle), key), gates)
