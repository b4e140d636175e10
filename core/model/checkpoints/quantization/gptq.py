"""GPTQ checkpoints: integers with a scale and a zero point per group of inputs, packed along the inputs.

Tests: tests/core/model/checkpoints/quantization/test_forms.py
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from ...config_json import ConfigJson
from .format import Narrow, Part, SchemedFormat
from .group_scaled import GroupScaled, groups_of, signed, signed_zeros
from .module_list import ModuleList
from .packing import WORD_BITS, num_words, unpack, words_of
from .read_fields import OF_TOOLS, check_known, num_groups, read_group_size, read_modules
from .reading import check_range, read_scales
from .scaled_scheme import ScaledScheme

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_WIDTHS = (2, 4, 8)

#: Values of `checkpoint_format` → the number added to a stored zero point.
_LAYOUTS = {"gptq": 1, "gptq_v2": 0}

_FIELDS = {
    "quant_method",
    "bits",
    "group_size",
    "desc_act",
    "checkpoint_format",
    "format",
    "pack_dtype",
    "dynamic",
    "modules_in_block_to_quantize",
    "modules_to_not_convert",
    "is_marlin_format",
}


class GptqScheme(ScaledScheme):
    """`qweight [in·bits/32, out]`, `qzeros [groups, out·bits/32]`, `scales [groups, out]`, `g_idx [in]`:
    `weight = (q − zero) · scale` of the column's group, which `g_idx` gives where it is there.
    """

    def __init__(self, bits: int, group: int | None, add: int, *, act_order: bool = False) -> None:
        """group: columns per group, None for one group. add: the number added to a stored zero point."""
        self._bits, self._group, self._add, self._act_order = bits, group, add, act_order
        groups = f"groups of {group}" if group else "a scale per channel"
        self.title = f"GPTQ, {bits} bits, {groups}{', act order' if act_order else ''}"

    def stores(self, checkpoint: Checkpoint, name: str) -> bool:
        return _name(name, "qweight") in checkpoint

    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> tuple[str, ...]:
        weight, zeros, scales, order = (_name(name, each) for each in ("qweight", "qzeros", "scales", "g_idx"))
        outputs, inputs = shape
        groups = num_groups(inputs, self._group)
        shapes: dict[str, tuple[int, ...]] = {
            weight: (num_words(inputs, self._bits), outputs),
            zeros: (groups, num_words(outputs, self._bits)),
        }
        if self._act_order or order in checkpoint:
            shapes[order] = (inputs,)
        checkpoint.check(shapes, ("I32",))
        checkpoint.check({scales: (groups, outputs)})
        return (*shapes, scales)

    def narrow(self, name: str) -> Narrow | None:
        return None if self._act_order else Narrow(self._bits, self._group, has_zeros=True)

    def scaled(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled:
        weight, zeros_name, scales_name, order = (
            _name(name, each) for each in ("qweight", "qzeros", "scales", "g_idx")
        )
        each, (rows, columns) = WORD_BITS // self._bits, part
        words, within = words_of(columns, each)
        values = unpack(checkpoint.read(weight, (words, rows)), self._bits, 0)[within]
        words, within = words_of(rows, each)
        groups, group_of = groups_of(columns, self._group)
        if order in checkpoint:
            groups, group_of = slice(0, checkpoint[scales_name].shape[0]), checkpoint.read(order, (columns,)).long()
            check_range(checkpoint, order, group_of, 0, groups.stop - 1)
        zeros = unpack(checkpoint.read(zeros_name, (groups, words)), self._bits, 1)[:, within].short() + self._add
        check_range(checkpoint, zeros_name, zeros, 0, (1 << self._bits) - 1)
        return GroupScaled(
            signed(values.T.contiguous(), self._bits),
            self._bits,
            read_scales(checkpoint, scales_name, (groups, rows)).T.contiguous(),
            signed_zeros(zeros.T, self._bits).contiguous(),
            group_of,
        )


class Gptq(SchemedFormat):
    """`quant_method: gptq`. `dynamic` may give modules another width or group size, or leave them plain."""

    def __init__(self, fields: ConfigJson) -> None:
        check_known(fields, _FIELDS, OF_TOOLS)
        if fields.text("pack_dtype", "int32") != "int32":
            raise fields.refuse("pack_dtype", "not supported; supported: int32")
        if fields.boolean("is_marlin_format"):
            raise fields.refuse("is_marlin_format", "not supported; use the checkpoint that it was made from")
        layout = "checkpoint_format" if "checkpoint_format" in fields.raw else "format"
        if fields.text(layout, "gptq") not in _LAYOUTS:
            raise fields.refuse(layout, f"not supported with quant_method gptq; supported: {', '.join(_LAYOUTS)}")
        add = _LAYOUTS[fields.text(layout, "gptq")]
        self._usual = _scheme(fields, add)
        self._rules = [_rule(fields, pattern, add) for pattern in _dynamic(fields)]
        self.title = self._usual.title
        self.plain = read_modules(fields, "modules_to_not_convert")
        self._only = ModuleList(_flat(fields, "modules_in_block_to_quantize"))

    def covers(self, checkpoint: Checkpoint, name: str) -> bool:
        is_listed = not self._only or ".layers." not in name or self._only.has(name.removesuffix(".weight"))
        return is_listed and super().covers(checkpoint, name)

    def left_out(self, checkpoint: Checkpoint, name: str) -> bool:
        """Some tools store biases of zeros for modules that have none."""
        if name.endswith(".bias") and checkpoint[name].is_plain:
            return not bool(checkpoint.read(name).any())
        return super().left_out(checkpoint, name)

    def scheme_of(self, name: str) -> GptqScheme | None:
        """That of the first rule that matches the module; None if it leaves the module plain."""
        module = name.removesuffix(".weight")
        return next((scheme for pattern, scheme in self._rules if pattern.match(module)), self._usual)


def _scheme(fields: ConfigJson, add: int) -> GptqScheme:
    if (bits := fields.integer("bits")) not in _WIDTHS:
        raise fields.refuse("bits", f"not supported with quant_method gptq; supported: {', '.join(map(str, _WIDTHS))}")
    return GptqScheme(bits, read_group_size(fields, "group_size"), add, act_order=fields.boolean("desc_act"))


def _dynamic(fields: ConfigJson) -> list[str]:
    """The expressions of `dynamic`."""
    dynamic = fields.object("dynamic")
    return [] if dynamic is None else list(dynamic.raw)


def _rule(fields: ConfigJson, key: str, add: int) -> tuple[re.Pattern[str], GptqScheme | None]:
    """A rule of `dynamic`: `-:EXPRESSION` leaves modules plain, `+:EXPRESSION` or `EXPRESSION` changes fields."""
    dynamic = fields.object("dynamic") or fields
    try:
        pattern = re.compile(key.removeprefix("+:").removeprefix("-:"))
    except re.error as error:
        raise dynamic.refuse(key, f"it is not a regular expression: {error}") from None
    if key.startswith("-:"):
        return pattern, None
    changed = dynamic.object(key)
    changes = {} if changed is None else changed.raw
    if changed is not None:
        check_known(changed, {"bits", "group_size", "desc_act"}, OF_TOOLS)
    return pattern, _scheme(
        ConfigJson(fields.path, {**fields.raw, **changes}, f"quantization_config.dynamic.{key}."), add
    )


def _flat(fields: ConfigJson, name: str) -> list[str]:
    """The texts of a list of lists of texts; empty when the field is missing or null."""
    value = [] if fields.raw.get(name) is None else fields.raw[name]
    if not isinstance(value, list) or not all(isinstance(each, list) for each in value):
        raise fields.refuse(name, "a list of lists of texts is needed")
    return [text for each in value for text in ConfigJson(fields.path, {name: each}).texts(name)]


def _name(name: str, kind: str) -> str:
    return name.removesuffix("weight") + kind
