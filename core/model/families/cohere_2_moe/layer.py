"""Cohere 2 MoE: what experts add up to has a factor.

Tests: tests/core/test_families.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import dataclass

from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...specs.feed_forward import Experts


@dataclass(frozen=True, kw_only=True)
class CohereMoeLayer(DecoderLayer):
    """The sum of all experts' outputs, the shared one's among them, has a factor."""

    factor: float = 1.0

    def mixture_part(self, b: Build, spec: Experts, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        return b.scale(super().mixture_part(b, spec, rows), self.factor)
