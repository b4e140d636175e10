"""Gemma 4: a mixture beside the dense part, an input of a layer's own, and a number that the residual stream is
multiplied by.

Tests: tests/core/paths, tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.mixtures import mixture
from ...compose.parts import per_layer_part
from ...program.ops.norm import Norm
from ...program.ops.rows import Scale
from ...specs.feed_forward import Experts
from ...weights.slot import SlotTensor


@dataclass(frozen=True, kw_only=True)
class Gemma4Layer(DecoderLayer):
    """The residual stream is multiplied by a learned number behind the layer."""

    per_layer_size: int = 0
    """See `PerLayerEmbeddingSpec.size`; 0: the layer has none."""

    beside: Experts | None = None
    """A mixture of experts beside the dense part. It reads the residual stream r through a norm of its own, its router
    through another one:

        x += norm_out(norm_1(dense(norm(r))) + norm_2(experts(norm_3(r))))
    """

    @property
    def experts(self) -> Experts | None:
        """See `LayerSpec.experts`."""
        return self.beside

    def _shares(self, size: int) -> dict[str, Any]:
        return {"beside": None if self.beside is None else self.beside.share(size)}

    def part(self, b: Build, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        y = super().part(b, rows)
        return y if self.beside is None else self._beside(b, self.beside, y)

    def _beside(self, b: Build, spec: Experts, y: Value) -> Value:
        """y and what the mixture adds, which reads the residual stream."""
        y = b.scale(b.norm("dense_out_norm", y, y), self.residual_multiplier)
        e = b.norm("experts_norm", b.x, "e")
        b.vector("router_norm", "router.scale", b.hidden, factor=b.hidden**-0.5)
        r = b.put(Norm(b.x, "r", "router_norm", b.norm_spec), b.hidden)
        z = mixture(b, spec, e, "z", r)
        return b.sum(y, b.scale(b.norm("experts_out_norm", z, z), self.residual_multiplier), "y")

    def end(self, b: Build) -> None:
        """See `DecoderLayer.end`."""
        if self.per_layer_size:
            b.add(per_layer_part(b, self, self.per_layer_size, b.x))
        scalar = b.weight("scalar", SlotTensor("layer_scalar", (1,)))
        b.put(Scale(b.x, b.x, weight=scalar, in_place=True), b.hidden)
        super().end(b)
