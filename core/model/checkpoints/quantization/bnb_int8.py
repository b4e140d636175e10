"""The int8 of bitsandbytes (LLM.int8): a largest magnitude per output channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .format import Narrow, Part
from .group_scaled import GroupScaled, groups_of
from .reading import check_range, read_scales
from .scaled_scheme import ScaledScheme

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_RECIPROCAL = 7.874015718698502e-3  # of 127, as the library has it


class BnbInt8(ScaledScheme):
    """`weight` (int8) and `SCB [out]`: `weight = q · SCB · (1/127)`, in that order, as the library computes it."""

    title = "bitsandbytes int8"

    def stores(self, checkpoint: Checkpoint, name: str) -> bool:
        return name in checkpoint and checkpoint[name].dtype == "I8"

    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> list[str]:
        module = name.removesuffix("weight")
        scale, layout = f"{module}SCB", f"{module}weight_format"
        checkpoint.check({name: shape}, ("I8",))
        checkpoint.check({scale: shape[:1]}, ("F32",))
        if layout not in checkpoint:
            return [name, scale]
        checkpoint.check({layout: checkpoint[layout].shape}, ("U8",))
        check_range(checkpoint, layout, checkpoint.read(layout), 0, 0)  # rows; others are of old GPUs
        return [name, scale, layout]

    def narrow(self, name: str) -> Narrow:
        return Narrow(8, None)

    def scaled(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled:
        rows, columns = part
        scales = read_scales(checkpoint, f"{name.removesuffix('weight')}SCB", (rows,)).unsqueeze(1)
        _, group_of = groups_of(columns, None)
        return GroupScaled(checkpoint.read(name, part), 8, scales, None, group_of, factor=_RECIPROCAL)
