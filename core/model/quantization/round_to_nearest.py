"""Quantises weights while they are read: each is rounded to the nearest whole number times its group's scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from ..config_json import UnsupportedModel
from .format import WeightFormat
from .group_scaled import GroupScaled, row_chunks
from .rounded_inputs import RoundedInputs

if TYPE_CHECKING:
    import torch

Name = Literal["int8", "int4", "w8a8", "w4a8"]

GROUPS = (128, 64, 32)
"""Inputs of a group of 4-bit weights: the first that divides a row."""


@dataclass(frozen=True, slots=True)
class RoundToNearest:
    """`int8`: one scale per row; `int4`: one per row and group of 128 inputs, or of 64 or 32 where 128 does not
    divide the row. Symmetric: there are no zero points. `w8a8` and `w4a8`: the same weights, and activations of 8 bits.

    A scale is the largest weight's size divided by (2^bits - 1) / 2, as in compressed-tensors, and rounded to bfloat16,
    as a quantised checkpoint stores them.
    """

    name: Name
    lm_head: bool = False
    """The output projection is quantised, too."""

    @property
    def bits(self) -> int:
        return {"int8": 8, "int4": 4, "w8a8": 8, "w4a8": 4}[self.name]

    @property
    def inputs(self) -> RoundedInputs | None:
        """How activations are rounded; None: they are not."""
        return RoundedInputs() if self.name in ("w8a8", "w4a8") else None

    def group_of(self, inputs: int) -> int:
        """Inputs of a group; the last one is shorter where no size divides the row."""
        if self.bits == 8:
            return inputs
        return next((group for group in GROUPS if not inputs % group), GROUPS[0])

    def __call__(self, weight: torch.Tensor) -> GroupScaled:
        """Quantise a weight `[out, in]`."""
        import torch

        rows, inputs = weight.shape
        group = self.group_of(inputs)
        values = torch.empty(rows, inputs, dtype=torch.int8)
        scales = torch.empty(rows, -(-inputs // group))
        for some in row_chunks(weight):
            values[some], scales[some] = self._rounded(weight[some], group)
        return GroupScaled(values, self.bits, scales, None, torch.arange(inputs) // group, inputs=self.inputs)

    def _rounded(self, weight: torch.Tensor, group: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Values and scales of some rows."""
        import torch

        rows, inputs = weight.shape
        half, groups = 1 << (self.bits - 1), -(-inputs // group)
        padded = torch.zeros(rows, groups * group)
        padded[:, :inputs] = weight
        padded = padded.view(rows, groups, group)
        scales = (padded.abs().amax(-1) / (half - 0.5)).bfloat16().float()
        inverse = torch.where(scales > 0, 1 / scales, 0)
        whole = padded.mul_(inverse[..., None]).round_().clamp_(-half, half - 1).to(torch.int8)
        return whole.view(rows, -1)[:, :inputs], scales

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a packed weight `[out, in]`: its numbers, and float32 scales."""
        return outputs * (-(-inputs * self.bits // 8) + 4 * -(-inputs // self.group_of(inputs)))


def quantiser_of(name: Name | None, lm_head: bool, stored: WeightFormat | None) -> RoundToNearest | None:
    """The quantiser that settings name; None: none.

    stored: the form of the checkpoint's own weights. Raises UnsupportedModel if weights are quantised already.
    """
    if name is None:
        return None
    if stored is not None:
        raise UnsupportedModel(
            f"quantization is {name!r}, but the checkpoint is quantised already; leave quantization, or use the "
            "original checkpoint"
        )
    return RoundToNearest(name, lm_head)
