"""Gemma 4: a mixture beside the dense part, an input of a layer's own, and a number that the residual stream is
multiplied by.

Tests: tests/core/paths, tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from ...program.ops.norm import Norm
from ...program.ops.rows import Scale, TakeInput
from ...specs.feed_forward import Experts
from ...specs.layers import LayerSpec
from ...weights.slot import SlotTensor
from ..build import Build, Proj, Value
from ..mixtures import mixture
from .decoder import DecoderLayer


class Gemma4Layer(DecoderLayer):
    """See `LayerSpec.beside`, `input_size` and `scaled`."""

    def feed_forward(self, b: Build, rows: Value) -> Value:
        """See `DecoderLayer.feed_forward`."""
        y = super().feed_forward(b, rows)
        return y if self.spec.beside is None else self._beside(b, self.spec.beside, y)

    def _beside(self, b: Build, spec: Experts, y: Value) -> Value:
        """y and what the mixture adds, which reads the residual stream."""
        y = b.scale(b.norm("dense_out_norm", y, y), self.spec.residual_multiplier)
        e = b.norm("experts_norm", b.x, "e")
        b.vector("router_norm", "router.scale", b.hidden, factor=b.hidden**-0.5)
        r = b.put(Norm(b.x, "r", "router_norm", b.norm_spec), b.hidden)
        z = mixture(b, spec, e, "z", r)
        return b.sum(y, b.scale(b.norm("experts_out_norm", z, z), self.spec.residual_multiplier), "y")

    def end(self, b: Build) -> None:
        """See `DecoderLayer.end`."""
        if self.spec.input_size:
            b.add(own_input(b, self.spec, b.x))
        if self.spec.scaled:
            scalar = b.weight("scalar", SlotTensor("layer_scalar", (1,)))
            b.put(Scale(b.x, b.x, weight=scalar, in_place=True), b.hidden)
        super().end(b)


def own_input(b: Build, spec: LayerSpec, rows: Value) -> Value:
    """What a layer's own input adds, by gates of these rows: see `LayerInputSpec`."""
    assert spec.dense is not None, "a layer with an input of its own has a dense part"
    gate = b.linear("input_gate", rows, "g", Proj("per_layer_input_gate", spec.input_size))
    g = b.concat("g", gate, b.put(TakeInput(), spec.input_size))
    f = b.activate(g, spec.dense.activation)
    y = b.linear("input_projection", f, "y", Proj("per_layer_projection", b.hidden))
    return b.scale(b.norm("input_norm", y, y), spec.residual_multiplier)
