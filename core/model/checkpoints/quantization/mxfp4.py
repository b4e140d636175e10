"""MXFP4 experts as gpt-oss' checkpoints have them: a layer's are one tensor of FP4 (E2M1) and one of powers of 2."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config_json import ConfigJson
from .format import Narrow, Part, WeightFormat
from .fp4 import BITS, doubles_of, read_powers
from .group_scaled import GroupScaled, groups_of
from .read_fields import check_known, num_groups, read_modules
from .scaled_scheme import ScaledScheme

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_GROUP = 32
_EXPERTS = ".experts."  # in the names of their weights


class Mxfp4(ScaledScheme, WeightFormat):
    """`quant_method: mxfp4`.

    `NAME_blocks [experts, out, in/32, 16]` has two numbers a byte, the first in the low bits, and
    `NAME_scales [experts, out, in/32]` exponents with a bias of 127: `weight = number · 2^(exponent − 127)`. Nothing
    but stacks of experts' weights is quantised.
    """

    title = "MXFP4"
    dimensions = (3,)

    def __init__(self, fields: ConfigJson) -> None:
        check_known(fields, {"quant_method", "modules_to_not_convert"}, {"dequantize"})
        self.plain = read_modules(fields, "modules_to_not_convert")

    def stores(self, checkpoint: Checkpoint, name: str) -> bool:
        return any(each in checkpoint for each in _names(name))

    def covers(self, checkpoint: Checkpoint, name: str) -> bool:
        return not self.plain.has(name) and self.stores(checkpoint, name)

    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> tuple[str, str]:
        blocks, scales = _names(name)
        experts, outputs, inputs = shape
        groups = experts, outputs, num_groups(inputs, _GROUP)
        checkpoint.check({blocks: (*groups, _GROUP // 2), scales: groups}, ("U8",))
        return blocks, scales

    def narrow(self, name: str) -> Narrow | None:
        return Narrow(BITS, _GROUP, mxfp4=True) if _EXPERTS in name else None

    def scaled(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled:
        blocks, scales = _names(name)
        rows, columns = part
        expert, first = divmod(rows.start, checkpoint[blocks].shape[1])
        groups, group_of = groups_of(columns, _GROUP)
        place = slice(expert, expert + 1), slice(first, first + rows.stop - rows.start), groups
        pairs = checkpoint.read(blocks, place)[0, :: rows.step or 1]
        powers = read_powers(checkpoint, scales, place)[0, :: rows.step or 1]
        begin = columns.start - groups.start * _GROUP
        values = doubles_of(pairs.flatten(1))[:, begin : begin + columns.stop - columns.start]
        return GroupScaled(values, BITS, powers / 2, None, group_of, mxfp4=True)


def _names(name: str) -> tuple[str, str]:
    return f"{name}_blocks", f"{name}_scales"
