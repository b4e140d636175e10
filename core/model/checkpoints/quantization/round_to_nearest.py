"""Quantises weights while they are read, each to the nearest whole number, or E4M3, times its group's scale."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from ...config_json import UnsupportedModel
from .format import WeightFormat
from .group_scaled import GroupScaled, row_chunks
from .rounded_inputs import Float8Inputs, RoundedInputs

if TYPE_CHECKING:
    import torch

Name = Literal["int8", "int4", "w8a8", "w4a8", "fp8"]

NAMES: tuple[Name, ...] = get_args(Name)

GROUPS = (128, 64, 32)
"""Inputs of a group of 4-bit weights: the first that divides a row."""

_DEVICE_CHUNK = 1 << 24
"""Elements that a GPU rounds at a time, by some ten launches."""

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

    def __call__(
        self, weight: torch.Tensor, name: str = "a weight", device: torch.device | str | None = None
    ) -> GroupScaled:
        """Quantise a weight `[out, in]`. name: of its tensor. device: where the result is made, chunk by chunk; None:
        where the weight is. It has the same bits on every device.

        Raises UnsupportedModel if it has numbers that are not finite.
        """
        import torch

        rows, inputs = weight.shape
        group, where = self.group_of(inputs), weight.device if device is None else torch.device(device)
        dtype = torch.float8_e4m3fn if self.is_float else torch.int8
        values = torch.empty(rows, inputs, dtype=dtype, device=where)
        scales = torch.empty(rows, -(-inputs // group), device=where)
        for some in row_chunks(weight) if where.type == "cpu" else row_chunks(weight, _DEVICE_CHUNK):
            wide = weight[some].to(where).to(torch.float32, copy=True)  # moved in its own dtype, and then widened
            values[some], scales[some] = (
                _rounded_floats(wide) if self.is_float else _rounded(wide, group, 1 << (self.bits - 1))
            )
        _check_finite(scales, name)
        return GroupScaled(values, self.bits, scales, None, torch.arange(inputs) // group, inputs=self.inputs)

    def num_bytes(self, outputs: int, inputs: int) -> int:
        """Bytes of a packed weight `[out, in]`: its numbers, and float32 scales."""
        return outputs * (-(-inputs * self.bits // 8) + 4 * -(-inputs // self.group_of(inputs)))


# These functions give the same bits on a CPU and on a GPU. Their operations on float32 are exact (comparisons, rounding
# to integers) or correctly rounded (+, *, /, casts), as IEEE 754 has them. Divisors and dividends are tensors: a GPU
# multiplies by the reciprocal of a divisor that is a Python number.


def _rounded(wide: torch.Tensor, group: int, half: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Integers from -half to half - 1 of some rows in float32, which are overwritten, and scales `[rows, groups]`."""
    import torch
    from torch.nn.functional import pad

    rows, inputs = wide.shape
    groups = -(-inputs // group)
    whole = wide if groups * group == inputs else pad(wide, (0, groups * group - inputs))
    whole = whole.view(rows, groups, group)
    scales = (_sizes(whole) / wide.new_tensor([half - 0.5])).bfloat16().float()
    inverse = torch.where(scales > 0, torch.ones_like(scales) / scales, 0)
    whole.mul_(inverse[..., None]).round_().clamp_(-half, half - 1)
    return whole.view(rows, -1)[:, :inputs], scales


def _rounded_floats(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers that FP8 rounds, ties to even, of some rows in float32, which are overwritten, and scales `[rows, 1]`."""
    scales = (_sizes(wide)[:, None] / wide.new_tensor([_LARGEST])).clamp_min_(_LEAST_SCALE)
    return wide.div_(scales).clamp_(-_LARGEST, _LARGEST), scales


def _sizes(rows: torch.Tensor) -> torch.Tensor:
    """The largest absolute value along the last dimension, without a copy of all of them."""
    import torch

    return torch.maximum(rows.amax(-1), rows.amin(-1).neg_()).abs_()  # of zeros: 0, not -0


def _check_finite(scales: torch.Tensor, name: str) -> None:
    if not bool(scales.isfinite().all()):
        raise UnsupportedModel(
            f"{name} has numbers that are not finite, which can't be quantised; download the checkpoint again, or "
            "leave quantization"
        )


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
