"""AWQ checkpoints: 4-bit integers with a scale and a zero point per group of inputs, packed along the outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...config_json import ConfigJson
from .format import Narrow, Part, WeightFormat
from .group_scaled import GroupScaled, groups_of, signed, signed_zeros
from .packing import num_words, unpack, words_of
from .read_fields import OF_TOOLS, check_known, num_groups, read_group_size, read_modules
from .reading import read_scales
from .scaled_scheme import ScaledScheme

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_BITS, _EACH = 4, 8

#: Which of eight consecutive outputs the word's nibbles hold, from the lowest (AutoAWQ's `gemm` layout).
_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

_FIELDS = {
    "quant_method",
    "bits",
    "w_bit",
    "group_size",
    "q_group_size",
    "version",
    "format",
    "modules_to_not_convert",
    "zero_point",  # zero points are stored either way
}

#: Further fields without effect on weights.
_NO_EFFECT = OF_TOOLS | {
    "act_order",
    "checkpoint_format",
    "desc_act",
    "do_fuse",
    "fuse_max_seq_len",
    "modules_in_block_to_quantize",
    "modules_to_fuse",
    "pack_dtype",
    "quant_type",
}


class Awq(ScaledScheme, WeightFormat):
    """`quant_method: awq` in the `gemm` layout.

    `qweight [in, out/8]`, `qzeros [groups, out/8]`, `scales [groups, out]`: `weight = (q − zero) · scale`.
    """

    def __init__(self, fields: ConfigJson) -> None:
        check_known(fields, _FIELDS, _NO_EFFECT)
        bits = "bits" if "bits" in fields.raw else "w_bit"
        if fields.integer(bits) != _BITS:
            raise fields.refuse(bits, "not supported with quant_method awq; supported: 4")
        layout = "version" if "version" in fields.raw else "format"
        if fields.text(layout, "gemm").lower() != "gemm":
            raise fields.refuse(layout, "not supported; supported: gemm; convert the checkpoint with AutoAWQ")
        self._group = read_group_size(fields, "group_size" if "group_size" in fields.raw else "q_group_size")
        self.plain = read_modules(fields, "modules_to_not_convert")
        self.title = f"AWQ, {_BITS} bits, {f'groups of {self._group}' if self._group else 'a scale per channel'}"

    def stores(self, checkpoint: Checkpoint, name: str) -> bool:
        return _names(name)[0] in checkpoint

    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        weight, zeros, scales = _names(name)
        outputs, inputs = shape
        words = num_words(outputs, _BITS)
        groups = num_groups(inputs, self._group)
        checkpoint.check({weight: (inputs, words), zeros: (groups, words)}, ("I32",))
        checkpoint.check({scales: (groups, outputs)})
        return weight, zeros, scales

    def narrow(self, name: str) -> Narrow:
        return Narrow(_BITS, self._group, has_zeros=True)

    def scaled(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled:
        names = _names(name)
        rows, columns = part
        words, within = words_of(rows, _EACH)
        groups, group_of = groups_of(columns, self._group)
        values = unpack(checkpoint.read(names[0], (columns, words)), _BITS, 1, _ORDER)[:, within]
        zeros = unpack(checkpoint.read(names[1], (groups, words)), _BITS, 1, _ORDER)[:, within]
        return GroupScaled(
            signed(values.T.contiguous(), _BITS),
            _BITS,
            read_scales(checkpoint, names[2], (groups, rows)).T.contiguous(),
            signed_zeros(zeros.T, _BITS).contiguous(),
            group_of,
        )


def _names(name: str) -> tuple[str, str, str]:
    module = name.removesuffix("weight")
    return f"{module}qweight", f"{module}qzeros", f"{module}scales"
