"""Falcon-H1: attention and a recurrent mixer side by side, with factors of both.

Tests: tests/core/layers/test_two_mixers.py
"""

from __future__ import annotations

from .....memory.pages.projections import Group
from ...program.ops.mix import Mix
from ...program.ops.rows import Scale
from ...specs.layers import MixerBeside
from ...weights.slot import SlotTensor, rows_of
from ..attention import attend, attention_in, heads, project
from ..build import Build, Value
from ..mixers import mixer_in, mixer_out, mixer_weights, products
from .decoder import DecoderLayer


class FalconH1Layer(DecoderLayer):
    """See `MixerBeside`."""

    def mixed(self, b: Build, n: Value) -> Value:
        """See `DecoderLayer.mixed`."""
        a, beside = self.spec.attention, self.spec.mixer_beside
        assert a is not None and beside is not None, "the layer has both"
        r = self._second_in(b, beside, n)
        q, _ = heads(b, a, attention_in(b, a, b.scale(n, beside.attention_in)))
        mixer_weights(b, beside.mixer)
        found, second = attend(b, a, q), b.put(Mix(r, "m", beside.mixer), beside.mixer.out_size)
        y = b.scale(project(b, a, found), beside.attention_out)
        z = b.scale(mixer_out(b, beside.mixer, second, "beside_out", "z"), beside.out_factor)
        return b.reduce(b.sum(y, z, "y"))

    def _second_in(self, b: Build, beside: MixerBeside, n: Value) -> Value:
        r = mixer_in(b, beside.mixer, b.scale(n, beside.in_factor, "r"), "beside_in", "r")
        if not beside.section_factors:
            return r
        (inputs,) = products(b, beside.mixer, Group.MIXER_IN)
        rows = rows_of(inputs.of(Group.MIXER_IN, b.hidden))
        made = SlotTensor("", (r.width,), rows, made=beside.section_factors)
        return b.put(Scale(r, r, weight=b.weight("beside_factors", made)), r.width)
