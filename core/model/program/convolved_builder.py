"""Builder of layers whose queries and keys are convolved before attention.

Tests: tests/core/layers/test_convolved_heads.py
"""

from __future__ import annotations

from ....memory.pages.projections import Group
from ..specs.attention import AttentionSpec
from ..specs.feed_forward import Experts, UngatedActivation
from ..specs.head_conv import HeadConvSpec
from ..specs.layers import LayerSpec
from ..specs.norms import NormSpec
from .builder import Kept, LayerBuilder, LayerProgram
from .ops import ROUTED, STREAM, Activate, Heads, Mix, Norm
from .zaya_ops import AddScaled, CarryRouted

#: The learned factors where a part is added, by the gates that other layers have there.
_SCALES = {"attention_gate": "attention_residual", "mlp_gate": "mlp_residual"}


class ConvolvedBuilder(LayerBuilder):
    """Appends the ops of a layer with `HeadConvSpec`: its convolutions and attention are apart, so the program has two
    parts.

    A small network stands before the router of its mixture of experts: see `Experts.router_size`.
    """

    def __init__(self, spec: LayerSpec, norm: NormSpec, convolved: HeadConvSpec) -> None:
        super().__init__(spec, norm)
        self._convolved = convolved

    def _queries(self, mixer: AttentionSpec) -> None:
        given = Kept("qkv", (self._convolved.out_size,))
        first = Mix("in", given.name, self._convolved)
        reads = (Kept("in", (self._convolved.in_size,)),)
        self.earlier = LayerProgram(tuple(self.parts[0]), (first,), (), reads, (given,))
        self.parts = [], [], []
        self._ops = self.parts[0]
        self._put(Heads(given.name, "q", None, mixer, self.norm))
        self.reads.append(Kept("q", (mixer.num_heads, mixer.query_dim)))

    def _add(self, y: str, gate: str = "") -> None:
        if not self.spec.scales_residual:
            super()._add(y, gate)
            return
        self._put(AddScaled(STREAM, y, _SCALES[gate]))

    def _experts(self, spec: Experts, rows: str, out: str, routed: str | None = None) -> str:
        return super()._experts(spec, rows, out, self._routed(rows) if spec.router_size else routed)

    def _routed(self, rows: str) -> str:
        """What the router takes."""
        low = self._gemm(Group.ROUTER_DOWN, rows, "rl")
        before, weight = (ROUTED, "routed_scale") if self.spec.takes_routed else (None, None)
        low = self._put(CarryRouted(low, before, weight))
        found = self._put(Norm(low, "rn", "routed_norm", self.norm))
        for group in (Group.ROUTER_FIRST, Group.ROUTER_SECOND):
            found = self._put(Activate(self._gemm(group, found, "rh"), "rh", UngatedActivation.GELU))
        return found
