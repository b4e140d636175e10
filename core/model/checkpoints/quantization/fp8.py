"""FP8 weights with one scale per tensor, per output channel or per block: `weight = stored · scale`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...config_json import ConfigJson, UnsupportedModel
from .format import Narrow, Part, WeightFormat
from .group_scaled import GroupScaled, groups_of
from .read_fields import check_known, read_modules
from .reading import REMEDY, check_float8, read_scales
from .rounded_inputs import Float8Inputs
from .scaled_scheme import ScaledScheme

if TYPE_CHECKING:
    from ..checkpoint import Checkpoint

_STORED = "F8_E4M3"
_SCALES = ("BF16", "F16", "F32", "F8_E8M0")
_FIELDS = {
    "quant_method",
    "fmt",
    "activation_scheme",
    "weight_block_size",
    "modules_to_not_convert",
    "modules_to_convert",
    "ignored_layers",
}

#: These need no field: tensors give their own dtype and that of their scales.
_NO_EFFECT = {"dequantize", "expert_dtype", "scale_fmt"}


class Fp8Scheme(ScaledScheme):
    """`weight` in FP8 with `weight_scale` or `weight_scale_inv`."""

    def __init__(
        self, block: Sequence[int] | None = None, *, inverse: bool = False, inputs: Float8Inputs | None = None
    ) -> None:
        """block: rows and columns that share a scale. None: a scale per tensor or per channel. inverse: scales may be
        called `weight_scale_inv`, and those of blocks are. inputs: activations are asked to be in FP8, too; with blocks
        they are not rounded.
        """
        self._inputs = inputs if block is None else None
        self._block = None if block is None else (block[0], block[1])
        self._inverse = inverse
        self.title = "FP8" if block is None else f"FP8, blocks of {block[0]} x {block[1]}"

    def with_inputs(self, inputs: Float8Inputs) -> Fp8Scheme:
        """The same with activations in FP8, unless it has blocks."""
        return self if self._block is not None else Fp8Scheme(inverse=self._inverse, inputs=inputs)

    def stores(self, checkpoint: Checkpoint, name: str) -> bool:
        return name in checkpoint and checkpoint[name].dtype == _STORED

    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> tuple[str, str]:
        scale = self._scale_name(checkpoint, name)
        checkpoint.check({name: shape}, (_STORED,))
        rows, columns = shape
        found = checkpoint[scale].shape if scale in checkpoint else ()
        allowed = [(), (1,), (1, 1), (rows,), (rows, 1)]
        if self._block is not None:
            allowed = [(-(-rows // self._block[0]), -(-columns // self._block[1]))]
        checkpoint.check({scale: found if found in allowed else allowed[-1]}, _SCALES)
        return name, scale

    def scaled(self, checkpoint: Checkpoint, name: str, part: Part) -> GroupScaled:
        import torch

        shape, scale_name = checkpoint[name].shape, self._scale_name(checkpoint, name)
        scale = read_scales(checkpoint, scale_name)
        if not bool((scale > 0).all()):
            raise UnsupportedModel(
                f"{checkpoint[scale_name].path}: tensor {scale_name} has scales that are not above 0; {REMEDY}"
            )
        scale = scale if scale.ndim == 2 else scale.reshape(-1, 1)
        rows, columns = part
        height = self._block[0] if self._block is not None else -(-shape[0] // scale.shape[0])
        groups, group_of = groups_of(columns, self._block[1] if self._block is not None else None)
        scales = scale[torch.arange(rows.start, rows.stop) // height, groups]
        values = checkpoint.read(name, part)
        check_float8(checkpoint, name, values)
        return GroupScaled(values, 8, scales, None, group_of, inputs=self._inputs)

    def narrow(self, name: str) -> Narrow:
        group = None if self._block is None else self._block[1]
        return Narrow(8, group, inputs=self._inputs, is_float=True)

    def _scale_name(self, checkpoint: Checkpoint, name: str) -> str:
        inverse = f"{name}_scale_inv"
        return inverse if self._inverse and (self._block or inverse in checkpoint) else f"{name}_scale"


class Fp8(Fp8Scheme, WeightFormat):
    """`quant_method: fp8`, whatever its `activation_scheme`."""

    def __init__(self, fields: ConfigJson) -> None:
        check_known(fields, _FIELDS, _NO_EFFECT)
        if fields.texts("modules_to_convert"):
            raise fields.refuse("modules_to_convert", "quantised embeddings are not supported; supported: null")
        if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise fields.refuse("fmt", "not supported; supported: e4m3")
        if fields.text("activation_scheme", "dynamic") not in ("dynamic", "static"):
            raise fields.refuse("activation_scheme", "not supported; supported: dynamic, static")
        block = fields.numbers("weight_block_size")
        if block and (len(block) != 2 or any(size < 1 or size != int(size) for size in block)):
            raise fields.refuse("weight_block_size", "two whole numbers of at least 1 are needed, such as [128, 128]")
        super().__init__([int(size) for size in block] if block else None, inverse=True, inputs=Float8Inputs())
        self.plain = read_modules(fields, "modules_to_not_convert", "ignored_layers")
