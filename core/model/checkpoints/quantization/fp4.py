"""FP4 (E2M1) weights with a scale per group of inputs: NVFP4 and MXFP4."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...config_json import UnsupportedModel
from .format import Narrow, Part
from .group_scaled import GroupScaled, groups_of
from .packing import words_of
from .reading import REMEDY, check_range, read_scales
from .scaled_scheme import ScaledScheme

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint

#: Twice the numbers of E2M1 by their four bits, which are integers.
_DOUBLES = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)

#: Bits that these need.
BITS = 5

_NAN = 255  # of the scales of MXFP4


@dataclass(frozen=True)
class Fp4(ScaledScheme):
    """Two numbers a byte, the first in the low bits; `weight = number · scale`."""

    title: str
    group: int
    packed: str = "weight_packed"
    """The end of the packed tensor's name."""

    divisor: str | None = None
    """The end of the name of a number that divides all scales."""

    factor: str | None = None
    """The end of the name of a number that multiplies all scales."""

    is_exponent: bool = False
    """Scales are powers of 2 with a bias of 127 (E8M0), as in MXFP4."""

    def stores(self, checkpoint: Checkpoint, name: str) -> bool:
        packed = _name(name, self.packed)
        return packed in checkpoint and checkpoint[packed].dtype == "U8"

    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> list[str]:
        outputs, inputs = shape
        packed, scale = _name(name, self.packed), f"{name}_scale"
        checkpoint.check({packed: (outputs, -(-inputs // 2))}, ("U8",))
        scales = (outputs, -(-inputs // self.group))
        checkpoint.check({scale: scales}, ("U8", "F8_E8M0") if self.is_exponent else ("F8_E4M3",))
        found = [packed, scale]
        for end in (self.divisor, self.factor):
            if end is not None:
                one = _name(name, end)
                told = checkpoint[one].shape if one in checkpoint else ()
                checkpoint.check({one: told if told == () else (1,)}, ("F32",))
                found.append(one)
        return found

    def narrow(self, name: str) -> Narrow:
        return Narrow(BITS, self.group, mxfp4=self.is_exponent)

    def scaled(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled:
        rows, columns = part
        stored, within = words_of(columns, 2)
        values = doubles_of(checkpoint.read(_name(name, self.packed), (rows, stored)))
        groups, group_of = groups_of(columns, self.group)
        scales = self._scales(checkpoint, name, (rows, groups))
        return GroupScaled(values[:, within], BITS, scales / 2, None, group_of, mxfp4=self.is_exponent)

    def _scales(self, checkpoint: Checkpoint, name: str, part: Sequence[slice]) -> torch.Tensor:
        scale = f"{name}_scale"
        if self.is_exponent:
            return read_powers(checkpoint, scale, part)
        scales = read_scales(checkpoint, scale, part)
        if self.divisor is not None:
            scales = scales / self._one(checkpoint, _name(name, self.divisor))
        return scales if self.factor is None else scales * self._one(checkpoint, _name(name, self.factor))

    def _one(self, checkpoint: Checkpoint, name: str) -> torch.Tensor:
        one = read_scales(checkpoint, name).reshape(())
        if not bool(one > 0):
            raise UnsupportedModel(f"{checkpoint[name].path}: tensor {name} is {float(one)}, not above 0; {REMEDY}")
        return one


def doubles_of(pairs: torch.Tensor) -> torch.Tensor:
    """Twice the numbers (int8 `[out, 2·n]`) of bytes `[out, n]`."""
    import torch

    doubles = torch.tensor(_DOUBLES, dtype=torch.int8)
    values = torch.empty(*pairs.shape, 2, dtype=torch.int8)
    values[..., 0] = doubles[(pairs & 15).int()]
    values[..., 1] = doubles[(pairs >> 4).int()]
    return values.flatten(1)


def read_powers(checkpoint: Checkpoint, name: str, part: Sequence[slice]) -> torch.Tensor:
    """Part of a tensor of exponents (E8M0) as powers of 2 in float32. Raises UnsupportedModel if one is NaN."""
    import torch

    exponents = checkpoint.read(name, part).view(torch.uint8).int()
    check_range(checkpoint, name, exponents, 0, _NAN - 1)
    return torch.ldexp(torch.ones(exponents.shape), exponents - 127)


def _name(name: str, end: str) -> str:
    return name.removesuffix("weight") + end
