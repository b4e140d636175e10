"""Quantises weights while they are read, each to the nearest whole number, or E4M3, times its group's scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ..config_json import UnsupportedModel
from .format import WeightFormat
from .group_scaled import GroupScaled, row_chunks
from .rounded_inputs import Float8Inputs, RoundedInputs

if TYPE_CHECKING:
    import torch

Name = Literal["int8", "int4", "w8a8", "w4a8", "fp8"]

NAMES: tuple[Name, ...] = get_args(Name)

GROUPS = (128, 64, 32)
"""Inputs of a group of 4-bit weights: the first that divides a row."""

_LARGEST = 448.0  # of E4M3
_LEAST_SCALE = 2.0**-126  # of float32, without subnormal numbers: a row of zeros has it


@dataclass(frozen=True, slots=True)
class RoundToNearest:
    """`int8`: one scale per row; `int4`: one per row and group of 128 inputs, or of 64 or 32 where 128 does not
    divide the row. Symmetric: there are no zero points. `w8a8` and `w4a8`: the same weights, and activations of 8 bits.
    `fp8`: E4M3 with one scale per row.

    A scale is the largest weight's size divided by (2^bits - 1) / 2, as in compressed-tensors, and rounded to bfloat16,
    as a quantised checkpoint stores them. Of FP8 it is that size divided by 448, in float32.
    """

    name: Name
    lm_head: bool = False
    """The output projection is quantised, too."""

    @property
    def bits(self) -> int:
        return 4 if self.name in ("int4", "w4a8") else 8

    @property
    def is_float(self) -> bool:
        """True if values are in FP8."""
        return self.name == "fp8"

    @property
    def inputs(self) -> RoundedInputs | Float8Inputs | None:
        """How activations are rounded; None: they are not."""
        if self.is_float:
            return Float8Inputs()
        return RoundedInputs() if self.name in ("w8a8", "w4a8") else None

    def group_of(self, inputs: int) -> int:
        """Inputs of a group; the last one is shorter where no size divides the row."""
        if self.bits == 8:
            return inputs
        return next((group for group in GROUPS if not inputs % group), GROUPS[0])

    def __call__(self, weight: torch.Tensor, name: str = "a weight") -> GroupScaled:
        """Quantise a weight `[out, in]`. name: of its tensor.

        Raises UnsupportedModel if it has numbers that are not finite.
        """
        import torch

        rows, inputs = weight.shape
        group = self.group_of(inputs)
        values = torch.empty(rows, inputs, dtype=torch.float8_e4m3fn if self.is_float else torch.int8)
        scales = torch.empty(rows, -(-inputs // group))
        for some in row_chunks(weight):
            values[some], scales[some] = (
                _rounded_floats(weight[some]) if self.is_float else self._rounded(weight[some], group)
            )
        if not bool(scales.isfinite().all()):
            raise UnsupportedModel(
                f"{name} has numbers that are not finite, which can't be quantised; download the checkpoint again, or "
                "leave quantization"
            )
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


def _rounded_floats(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Values in FP8 of some rows, ties to even, and scales `[rows, 1]`."""
    import torch

    wide = weight.float()
    scales = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp_min(_LEAST_SCALE)
    return (wide / scales).clamp_(-_LARGEST, _LARGEST).to(torch.float8_e4m3fn), scales


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
