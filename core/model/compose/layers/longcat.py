"""LongCat-Flash: a mixture beside one layer's dense part is added behind the next layer.

Tests: tests/core/layers/test_late_mixtures.py
"""

from __future__ import annotations

from ...program.op import LATE
from ..build import Build, Value
from ..mixtures import mixture
from .decoder import DecoderLayer


class LongCatLayer(DecoderLayer):
    """See `LayerSpec.is_late` and `takes_late`."""

    def feed_forward(self, b: Build, rows: Value) -> Value:
        """See `DecoderLayer.feed_forward`."""
        if self.spec.is_late and self.spec.beside is not None:
            mixture(b, self.spec.beside, rows, LATE)
        return super().feed_forward(b, rows)

    def end(self, b: Build) -> None:
        """See `DecoderLayer.end`."""
        if self.spec.takes_late:
            b.add(Value(LATE, b.hidden))
        super().end(b)
