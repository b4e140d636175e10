"""ERNIE 4.5 VL: positions of images go to experts of their own.

Tests: tests/core/media/test_image_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from .....memory.pages.projections import Role
from ...compose.build import Build, Value
from ...compose.decoder_layer import DecoderLayer
from ...compose.mixtures import listed, mixture_weights, projections_of
from ...program.ops.moe import Moe
from ...specs.feed_forward import Experts
from ...weights.layer_weights import PartWeights
from ...weights.slot import Keep, SlotTensor
from ...weights.slots import EXPERTS
from .experts import ErnieVlExperts
from .ops import IMAGE_EXPERTS, MoeOfImages

#: The router of experts of images' positions, and its correction.
IMAGE_ROUTER, IMAGE_CORRECTION = "mlp.image_gate.weight", "mlp.image_gate.e_score_correction_bias"


@dataclass(frozen=True, kw_only=True)
class ErnieVlLayer(DecoderLayer):
    """See `ErnieVlExperts`."""

    LACKS_ON_GPU = "go to experts of their own"

    sees: bool = False
    """Images are served; else their experts stay unread."""

    def seeing(self) -> Self:
        """See `LayerSpec.seeing`."""
        return replace(self, sees=True)

    def mixture_part(self, b: Build, spec: Experts, rows: Value) -> Value:
        """See `DecoderLayer.part`."""
        assert isinstance(spec, ErnieVlExperts), "its mixtures have experts of images"
        mixture_weights(b, spec)
        self._of_images(b, spec)
        op = MoeOfImages(rows, None, "y", spec) if self.sees else Moe(rows, None, "y", spec)
        return b.reduce(b.put(op, b.hidden))

    def _of_images(self, b: Build, spec: ErnieVlExperts) -> None:
        """Declare the experts of images' positions, whose numbers go on behind the others'."""
        own, count, at = spec.of_images.projections(b.hidden), spec.count, IMAGE_EXPERTS
        numbers, few, many = range(count, 2 * count), Keep.FLOAT32, Keep.EXPERT
        b.part(at, _made)
        if not self.sees:
            few = many = Keep.UNUSED
        b.weight(f"{at}.router", SlotTensor(IMAGE_ROUTER, (count, b.hidden)), keep=few)
        for name, role in (("gate_up", Role.EXPERT_GATE_UP), ("down", Role.EXPERT_DOWN)):
            listed(b, f"{at}.{name}", projections_of(own, role), numbers, keep=many)
        if spec.routing.corrected:
            b.weight(f"{at}.correction", SlotTensor(IMAGE_CORRECTION, (count,)), keep=few)


def _made(of: PartWeights) -> Any:
    """Experts of images' positions, beside which all tokens' are those of the others."""
    from ...moe.listed_experts import ListedExperts

    own = of.parts[EXPERTS]
    shared = {name: getattr(own, name) for name in ("shared_gate_up", "shared_down", "shared_gate")}
    return ListedExperts(**of.own, **shared)
