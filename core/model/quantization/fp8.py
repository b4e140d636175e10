"""FP8 weights with one scale per tensor, per output channel or per block: `weight = stored · scale`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..config_json import ConfigJson, UnsupportedModel
from .format import WeightFormat

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint

_STORED = "F8_E4M3"
_SCALES = ("BF16", "F16", "F32")
_FIELDS = {
    "quant_method",
    "fmt",
    "activation_scheme",
    "weight_block_size",
    "modules_to_not_convert",
    "ignored_layers",
    "dequantize",
}
_LEFT_OUT = (".input_scale", ".activation_scale", ".k_scale", ".v_scale")


class Fp8(WeightFormat):
    """`quant_method: fp8`. Activations are not quantised (W8A16), whatever `activation_scheme` says."""

    def __init__(self, fields: ConfigJson) -> None:
        for name in sorted(fields.raw.keys() - _FIELDS):
            raise fields.refuse(name, f"not supported with quant_method fp8; supported: {', '.join(sorted(_FIELDS))}")
        if fields.text("fmt", "e4m3") not in ("e4m3", "float8_e4m3fn"):
            raise fields.refuse("fmt", "not supported; supported: e4m3")
        if fields.text("activation_scheme", "dynamic") not in ("dynamic", "static"):
            raise fields.refuse("activation_scheme", "not supported; supported: dynamic, static")
        block = fields.numbers("weight_block_size")
        if block and (len(block) != 2 or any(size < 1 or size != int(size) for size in block)):
            raise fields.refuse("weight_block_size", "two whole numbers of at least 1 are needed, such as [128, 128]")
        self._block = (int(block[0]), int(block[1])) if block else None
        self._plain = fields.texts("modules_to_not_convert") + fields.texts("ignored_layers")

    def covers(self, name: str) -> bool:
        module = f".{name.removesuffix('.weight')}."
        return not any(module.startswith(f".{each}.") or module.endswith(f".{each}.") for each in self._plain)

    def left_out(self, name: str) -> bool:
        return name.endswith(_LEFT_OUT)

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

    def read_into(self, target: torch.Tensor, checkpoint: Checkpoint, name: str, part: Sequence[slice]) -> None:
        import torch

        shape = checkpoint[name].shape
        scale_name = self._scale_name(checkpoint, name)
        entry = checkpoint[scale_name]
        scale = torch.empty(entry.shape, dtype=torch.float32)
        checkpoint.read_into(scale, scale_name)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise UnsupportedModel(
                f"{entry.path}: tensor {scale_name} has scales that are not finite numbers above 0; "
                "download or quantise the checkpoint again"
            )
        weight = torch.empty(target.shape, dtype=torch.float32)
        checkpoint.read_into(weight, name, part)
        slices = (*part, slice(None), slice(None))[:2]
        if self._block is None:
            weight *= scale if scale.numel() == 1 else scale.reshape(-1, 1)[slices[0]]
        else:
            self._scale_blocks(weight, scale, [torch.arange(n)[each] for n, each in zip(shape, slices, strict=True)])
        target.copy_(weight)

    def _scale_blocks(self, weight: torch.Tensor, scale: torch.Tensor, places: Sequence[torch.Tensor]) -> None:
        """Multiply a part of a matrix with its blocks' scales. places: rows and columns of the matrix that it has."""
        import torch

        rows, columns = (each // size for each, size in zip(places, self._block or (), strict=True))
        for row in rows.unique().tolist():  # one row of blocks at a time: the scales are never as large as the weight
            first, last = torch.searchsorted(rows, torch.tensor([row, row + 1])).tolist()
            weight[first:last] *= scale[row][columns]

    def _scale_name(self, checkpoint: Checkpoint, name: str) -> str:
        inverse = f"{name}_scale_inv"
        return inverse if self._block or inverse in checkpoint else f"{name}_scale"
