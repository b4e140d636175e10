"""Inkling: attention with learned numbers of distances, convolutions of keys, values and of what parts add, and sinks.

Tests: tests/core/layers/test_stream_convs.py, tests/core/layers/test_sink_experts.py,
tests/core/layers/test_relative_attention.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from .....memory.pages.projections import Role
from .....ops.mixers.conv_place import ConvPlace
from ...compose.attention import attention_in, attention_out
from ...compose.build import Build, Proj, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.mixers import mixer_weights
from ...compose.mixtures import listed_experts, mixture_weights, projections_of, small
from ...compose.parts import dense
from ...program.op import Read, View
from ...program.ops.rows import Scale
from ...specs.attention import AttentionSpec
from ...specs.feed_forward import Experts, GatedSpec, UngatedSpec
from ...weights.slot import Keep, SlotTensor, weight_tensor
from .experts import SinkExperts
from .ops import ConvolveStream, MoeWithSinks, TakeRelative
from .stream_convs import StreamConvSpec

#: The router's rows of sinks.
_SINK_ROUTER = "mlp.sink_gate.weight"

_PLACES = {"attention_out_norm": ConvPlace.ATTENTION, "mlp_out_norm": ConvPlace.FEED_FORWARD}


@dataclass(frozen=True, kw_only=True)
class InklingLayer(DecoderLayer):
    """See `StreamConvSpec`, `RelativeSpec` and `SinkExperts`. What a dense part adds has a learned factor."""

    VERB = "have, beside attention,"

    convolutions: StreamConvSpec

    @property
    def recurrent(self) -> StreamConvSpec:
        """See `LayerSpec.recurrent`."""
        return self.convolutions

    def _shares(self, size: int) -> dict[str, Any]:
        return {"convolutions": self.convolutions.share(size)}

    def build(self, b: Build) -> None:
        """See `DecoderLayer.build`."""
        mixer_weights(b, self.convolutions)
        super().build(b)

    def _convolved(self, b: Build, x: Read, out: str, width: int, place: ConvPlace) -> Value:
        return b.put(ConvolveStream(x, out, width, place, self.convolutions), width)

    def add(self, b: Build, name: str, y: Value) -> None:
        """See `DecoderLayer.add`."""
        b.add(self._convolved(b, y, "c", b.hidden, _PLACES[name]))

    def attention_in(self, b: Build, a: AttentionSpec, n: Value) -> Value:
        """See `DecoderLayer.inputs`."""
        size, first, kept = _states(a), a.q_rows, 2 * a.kv_size
        x = attention_in(b, a, n, Proj("self_attn.r_proj", size, a.num_heads, form=a.form))
        kv = self._convolved(b, View(x, first, first + kept), "kv", kept, ConvPlace.KEYS_AND_VALUES)
        return b.concat("in", View(x, 0, first), kv, View(x, first + kept))

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        assert a.relative is not None, "attention has numbers of distances"
        size = _states(a)
        relative = b.put(TakeRelative(View(x, -size), "rel", a), size)
        shape = (a.relative.dim, a.relative.extent)
        b.weight("profiles", SlotTensor("self_attn.rel_logits_proj.proj", shape))
        return attention_out(b, a, View(x, 0, -size, copied=True), relative=relative)

    def dense_part(self, b: Build, spec: GatedSpec | UngatedSpec, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        y = dense(b, spec, rows)
        return b.put(Scale(y, y, weight=b.weight("mlp_scale", SlotTensor("mlp.global_scale", (1,)))), b.hidden)

    def mixture_part(self, b: Build, spec: Experts, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        assert isinstance(spec, SinkExperts), "its mixtures have sinks"
        at, own = "sink_experts", spec.of_sinks.projections(b.hidden)
        mixture_weights(b, spec)
        b.part(at, listed_experts)
        small(b, "scale", "mlp.gate.global_scale", 1)
        b.weight(f"{at}.router", SlotTensor(_SINK_ROUTER, (spec.sinks, b.hidden)), keep=Keep.FLOAT32)
        for name, role in (("gate_up", Role.EXPERT_GATE_UP), ("down", Role.EXPERT_DOWN)):
            each_of = (each.of_expert(it) for it in range(spec.sinks) for each in projections_of(own, role))
            named = (replace(each, path=each.path.replace("mlp.experts.", "mlp.sink_experts.")) for each in each_of)
            b.weight(f"{at}.{name}", *map(weight_tensor, named), keep=Keep.EXPERT, count=spec.sinks)
        return b.reduce(b.put(MoeWithSinks(rows, "y", spec), b.hidden))


def _states(a: AttentionSpec) -> int:
    """Elements of a token's relative states."""
    assert a.relative is not None, "attention has numbers of distances"
    return a.num_heads * a.relative.dim
