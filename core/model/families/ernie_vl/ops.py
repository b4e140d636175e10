"""The mixture of experts, and of those of images' positions (ERNIE 4.5 VL).

Tests: tests/core/media/test_image_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...program.op import NoNativeOp
from ...program.ops.moe import Moe
from .experts import ErnieVlExperts

if TYPE_CHECKING:
    from ...program.lowering import Lowering
    from ...program.torch_step import OpContext, Run, Step

#: Slots `image_experts.…` are of the mixture of images' positions.
IMAGE_EXPERTS = "image_experts"


@dataclass(frozen=True, slots=True)
class MoeOfImages(Moe):
    """A mixture of experts, and the one that positions of images go to."""

    SLOTS = ("experts", "of_images")

    spec: ErnieVlExperts
    of_images: str = IMAGE_EXPERTS

    def torch(self, at: OpContext) -> Run:
        """See `Op.torch`."""
        from ...moe.experts import lora_of
        from ...moe.mixture_lora import MixtureLora
        from .mixture import mix_by_modality

        text, read, index = Moe.torch(self, at), at.reader(self.x), at.index

        def run(step: Step) -> None:
            if (of_images := step.batch.image_tokens) is None:
                text(step)
                return
            weights, lora = step.layers[index], step.batch.lora
            both = weights[self.experts], weights[self.of_images]
            added = None if lora is None else lora_of(lora.mixture(index), MixtureLora)
            step.names[self.out] = mix_by_modality(read(step.names), both, self.spec, of_images, added)

        return run

    def native(self, to: Lowering, at: int) -> None:
        """See `Op.native`."""
        raise NoNativeOp("mixture with experts of images")
