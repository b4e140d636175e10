"""Falcon-H1: attention and a recurrent mixer side by side, with factors of both.

Tests: tests/core/layers/test_two_mixers.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ...compose.attention import attend, attention_in, heads, project
from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.mixers import mixer_in, mixer_out, mixer_weights, product
from ...compose.parts import activated, down, gate_up
from ...program.op import View
from ...program.ops.mix import Mix
from ...program.ops.rows import Scale
from ...specs.feed_forward import GatedSpec, UngatedSpec
from ...specs.recurrent import RecurrentSpec
from ...weights.slot import SlotTensor, rows_of


@dataclass(frozen=True, slots=True)
class MixerBeside:
    """A recurrent mixer beside attention (Falcon-H1).

    Both read one norm n of the residual stream, and are added:

        attention_out · attention(attention_in · n) + out_factor · mixer(in_factor · n)

    None of the factors may be part of a weight: adapters change both sides of the product, and biases come after it.
    """

    mixer: RecurrentSpec
    in_factor: float = 1.0
    out_factor: float = 1.0
    attention_in: float = 1.0
    attention_out: float = 1.0

    section_factors: tuple[float, ...] = ()
    """Of the sections of the input projection's outputs (see `Projection.sections`); empty: they have none."""

    def share(self, size: int) -> MixerBeside:
        """One of `size` ranks' share."""
        return replace(self, mixer=self.mixer.share(size))


@dataclass(frozen=True, kw_only=True)
class FactoredLayer(DecoderLayer):
    """Its gated part is `part_factor · down(activation(gate_factor · gate(x)) · up(x))`."""

    gate_factor: float = 1.0
    part_factor: float = 1.0

    def dense_part(self, b: Build, spec: GatedSpec | UngatedSpec, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        gu = gate_up(b, spec, rows)
        if self.gate_factor != 1.0:
            b.put(Scale(View(gu, 0, spec.size), gu, self.gate_factor, in_place=True), gu.width)
        return b.scale(down(b, spec, activated(b, spec, gu)), self.part_factor)


@dataclass(frozen=True, kw_only=True)
class FalconH1Layer(FactoredLayer):
    """See `MixerBeside`."""

    VERB = "have, beside attention,"

    beside: MixerBeside

    @property
    def recurrent(self) -> RecurrentSpec:
        """See `LayerSpec.recurrent`."""
        return self.beside.mixer

    @property
    def num_parts(self) -> int:
        """See `LayerSpec.num_parts`."""
        return 3

    def _shares(self, size: int) -> dict[str, Any]:
        return {"beside": self.beside.share(size)}

    def mixed(self, b: Build, n: Value) -> Value:
        """See `DecoderLayer.mixed`."""
        a, beside = self.attention, self.beside
        assert a is not None, "the layer has attention"
        r = self._second_in(b, beside, n)
        q, _ = heads(b, a, attention_in(b, a, b.scale(n, beside.attention_in)))
        mixer_weights(b, beside.mixer)
        found, second = attend(b, a, q), b.put(Mix(r, "m", beside.mixer), beside.mixer.out_size)
        y = b.scale(project(b, a, found), beside.attention_out)
        z = b.scale(mixer_out(b, beside.mixer, second, "mixer_out", "z"), beside.out_factor)
        return b.reduce(b.sum(y, z, "y"))

    def _second_in(self, b: Build, beside: MixerBeside, n: Value) -> Value:
        r = mixer_in(b, beside.mixer, b.scale(n, beside.in_factor, "r"), "mixer_in", "r")
        if not beside.section_factors:
            return r
        (inputs,) = product(b, beside.mixer, "in")
        rows = rows_of(inputs.of("mixer_in", b.hidden))
        made = SlotTensor("", (r.width,), rows, made=beside.section_factors)
        return b.put(Scale(r, r, weight=b.weight("mixer_factors", made)), r.width)
