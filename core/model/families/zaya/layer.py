"""ZAYA: convolutions of queries and keys, learned factors where parts are added, and a router that goes over layers.

Tests: tests/core/layers/test_convolved_heads.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ...compose.attention import attend, project
from ...compose.build import Build, Proj, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.mixers import mixer_weights
from ...compose.mixtures import listed_experts, mixture
from ...program.op import ROUTER_STATE
from ...program.ops.heads import Heads
from ...program.ops.mix import Mix
from ...specs.attention import AttentionSpec
from ...specs.feed_forward import Experts, UngatedActivation
from ...weights.layer_weights import PartWeights
from ...weights.slot import Keep, SlotTensor
from ...weights.slots import EXPERTS
from .head_conv import HeadConvSpec
from .ops import AddScaled, CarryRouterState

if TYPE_CHECKING:
    from torch import Tensor

#: Parts by the norm of what they give, in paths and slots.
_PARTS = {"attention_out_norm": "attention", "mlp_out_norm": "mlp"}

#: Learned factors and summands of what a part adds, and of the residual stream.
_SCALES = ("hidden_states_scale", "hidden_states_bias", "residual_scale", "residual_bias")

_OF_THE_NEXT = "would give a first token its bias for the one before"

#: The router's correction of the choice that gives nothing: transformers sets it whenever it loads a model.
_SKIPPED = -1.0


@dataclass(frozen=True, kw_only=True)
class ZayaExperts(Experts):
    """One choice more, behind the experts, gives nothing. The router takes what a small network makes of the layer's
    input, and of what the network of the layer before began with.
    """

    LACKS = "mixture with an expert that gives nothing"

    router_size: int
    """Width of what the router takes."""

    @property
    def choices(self) -> int:
        """See `Experts.choices`."""
        return self.count + 1

    def given(self, x: Tensor) -> Tensor:
        """See `Experts.given`."""
        return x.new_zeros(x.shape)

    def router_inputs(self, hidden: int) -> int:
        """See `Experts.router_inputs`."""
        del hidden
        return self.router_size


@dataclass(frozen=True, kw_only=True)
class ZayaLayer(DecoderLayer):
    """See `HeadConvSpec`, `AddScaled` and `ZayaExperts`."""

    VERB = "have, before attention,"
    WHY_WHOLE = "half of all heads' values are those of the token before, which other ranks would have"

    convolutions: HeadConvSpec

    is_first: bool = False
    """No layer is before it, from which its router would go on."""

    @property
    def recurrent(self) -> HeadConvSpec:
        """See `LayerSpec.recurrent`."""
        return self.convolutions

    def attention_in(self, b: Build, a: AttentionSpec, n: Value) -> Value:
        """The first half of all heads' values is a token's own, and the second that of the token before, so that TP
        ranks can't share them.
        """
        convs, at = self.convolutions, "self_attn"
        widths = {"q_proj": convs.num_heads, "k_proj": convs.num_kv_heads}
        half = convs.num_kv_heads * convs.head_dim // 2
        return b.linear(
            "qkv",
            n,
            "in",
            *(Proj(f"{at}.{name}", count * convs.head_dim, count) for name, count in widths.items()),
            Proj(f"{at}.v_proj_current", half),
            Proj(f"{at}.v_proj_delayed", half, why_no_bias=_OF_THE_NEXT),
        )

    def attention_out(self, b: Build, a: AttentionSpec, x: Value, n: Value) -> Value:
        """See `DecoderLayer.outputs`."""
        convs = self.convolutions
        mixer_weights(b, convs)
        x = b.put(Mix(Value(x, convs.in_size), "qkv", convs), convs.out_size)
        q = b.put(Heads(x, "q", None, a, b.norm_spec), a.num_heads, a.query_dim)
        return project(b, a, attend(b, a, q))

    def mixture_part(self, b: Build, spec: Experts, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        b.part(EXPERTS, _skipping)
        return mixture(b, spec, rows, routed=self._routed(b, rows, spec.router_inputs(b.hidden)))

    def _routed(self, b: Build, rows: Value, size: int) -> Value:
        """What a small network makes of these rows and of what that of the layer before began with."""
        at, activation = "mlp.router", UngatedActivation.GELU
        low = b.linear("router_down", rows, "rl", Proj(f"{at}.down_proj", size, bias=True), merges=False)
        before = weight = None
        if not self.is_first:
            before, weight = ROUTER_STATE, b.vector("router_state_scale", f"{at}.states_scale", size, Keep.PLAIN)
        low = b.put(CarryRouterState(low, before, weight, b.lasting(ROUTER_STATE, size)), size)
        found = b.norm("router_norm", low, "rn", path=f"{at}.norm")
        for slot, name in (("router_first", "fc1"), ("router_second", "fc2")):
            found = b.linear(slot, found, "rh", Proj(f"{at}.{name}", size, bias=True), merges=False)
            found = b.activate(found, activation, "rh")
        return found

    def add(self, b: Build, name: str, y: Value) -> None:
        """See `DecoderLayer.add`."""
        part = _PARTS[name]
        scales = (SlotTensor(f"post_{part}_residual_scale.{each}", (b.hidden,)) for each in _SCALES)
        b.put(AddScaled(b.x, y, b.weight(f"{part}_residual", *scales)), b.hidden)


def _skipping(of: PartWeights) -> Any:
    """The experts; a checkpoint's own correction of the choice that gives nothing has no effect."""
    found = listed_experts(of)
    found.correction[-1] = _SKIPPED
    return found
