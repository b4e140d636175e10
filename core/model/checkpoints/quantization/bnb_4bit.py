"""The 4 bits of bitsandbytes (QLoRA): numbers of a table, with a scale per block of a flattened weight.

Tests: tests/core/model/checkpoints/quantization/test_bitsandbytes.py
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NamedTuple

from ...config_json import ConfigJson, UnsupportedModel
from .format import Part, WeightScheme
from .group_scaled import row_chunks
from .reading import REMEDY, read_scales

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint

_KINDS = ("nf4", "fp4")


class _State(NamedTuple):
    """The library's description of a quantised weight."""

    name: str
    kind: str
    block: int
    """Elements that share a scale."""
    nested_block: int | None
    """Scales that share a scale. None: the scales are float32."""
    offset: float
    """Of scales that have scales."""
    shape: list[int]


class Bnb4Bit(WeightScheme):
    """`weight` has two elements a byte, the first in the high bits, of the weight row after row;
    `weight = quant_map[bits] · absmax[element // block]`.

    absmax may be quantised itself: `nested_quant_map[absmax] · nested_absmax[block // nested_block] + offset`.
    """

    title = "bitsandbytes, 4 bits"

    def stores(self, checkpoint: Checkpoint, name: str) -> bool:
        return f"{name}.absmax" in checkpoint

    def check(self, checkpoint: Checkpoint, name: str, shape: tuple[int, ...]) -> list[str]:
        state = _read_state(checkpoint, name)
        size = shape[0] * shape[1]
        if state.shape != list(shape):
            raise UnsupportedModel(
                f"{checkpoint[state.name].path}: tensor {state.name} says shape {state.shape}, "
                f"config.json needs {list(shape)}"
            )
        blocks = -(-size // state.block)
        absmax, table = f"{name}.absmax", f"{name}.quant_map"
        itemsize = checkpoint[name].itemsize if name in checkpoint else 1
        checkpoint.check({name: (-(-size // (2 * itemsize)), 1)}, ("U8", "F16", "BF16", "F32"))
        checkpoint.check({table: (16,)}, ("F32",))
        if state.nested_block is None:
            checkpoint.check({absmax: (blocks,)}, ("F32",))
            return [name, state.name, absmax, table]
        nested, nested_table = f"{name}.nested_absmax", f"{name}.nested_quant_map"
        checkpoint.check({absmax: (blocks,)}, ("U8",))
        checkpoint.check({nested: (-(-blocks // state.nested_block),), nested_table: (256,)}, ("F32",))
        return [name, state.name, absmax, table, nested, nested_table]

    def read_into(self, target: torch.Tensor, checkpoint: Checkpoint, name: str, part: Part) -> None:
        import torch

        state, (rows, columns) = _read_state(checkpoint, name), part
        width = state.shape[1]
        codes = _read_codes(checkpoint, name, slice(rows.start * width, rows.stop * width)).view(-1, width)
        table = read_scales(checkpoint, f"{name}.quant_map")
        absmax = _read_absmax(checkpoint, name, state)
        for chunk in row_chunks(target):
            first, end = (rows.start + chunk.start) * width, (rows.start + chunk.stop) * width
            scales = absmax[torch.arange(first, end) // state.block].view(-1, width)[:, columns]
            target[chunk].copy_(table[codes[chunk, columns].int()] * scales)


def _read_state(checkpoint: Checkpoint, name: str) -> _State:
    """The JSON that a tensor of bytes holds."""
    names = [f"{name}.quant_state.bitsandbytes__{kind}" for kind in _KINDS]
    found = next((each for each in names if each in checkpoint), names[0])
    checkpoint.check({found: checkpoint[found].shape if found in checkpoint else ()}, ("U8",))
    path = checkpoint[found].path
    try:
        raw: Any = json.loads(bytes(checkpoint.read(found).tolist()))
        if not isinstance(raw, dict):
            raise ValueError("an object is needed")
    except ValueError as error:
        raise UnsupportedModel(f"{path}: tensor {found} is not JSON: {error}; {REMEDY}") from None
    fields = ConfigJson(path, raw, f"{found}.")
    if fields.text("quant_type") not in _KINDS:
        raise fields.refuse("quant_type", f"not supported; supported: {', '.join(_KINDS)}")
    nested = f"{name}.nested_absmax" in checkpoint
    offset = raw.get("nested_offset", 0.0)
    if not isinstance(offset, int | float) or not math.isfinite(offset):
        raise fields.refuse("nested_offset", "a finite number is needed")
    return _State(
        found,
        kind=fields.text("quant_type"),
        block=fields.integer("blocksize"),
        nested_block=fields.integer("nested_blocksize") if nested else None,
        offset=float(offset),
        shape=[int(size) for size in fields.numbers("shape")],
    )


def _read_codes(checkpoint: Checkpoint, name: str, elements: slice) -> torch.Tensor:
    """The four bits of elements (uint8), which may be stored in bytes or as another dtype's bytes."""
    import torch

    each = 2 * checkpoint[name].itemsize
    first, end = elements.start // each, -(-elements.stop // each)
    packed = checkpoint.read(name, (slice(first, end),)).view(torch.uint8).flatten()
    codes = torch.empty(len(packed), 2, dtype=torch.uint8)
    codes[:, 0], codes[:, 1] = packed >> 4, packed & 15
    return codes.flatten()[elements.start - first * each : elements.stop - first * each]


def _read_absmax(checkpoint: Checkpoint, name: str, state: _State) -> torch.Tensor:
    """The scales of all blocks in float32."""
    import torch

    if state.nested_block is None:
        return read_scales(checkpoint, f"{name}.absmax")
    codes = checkpoint.read(f"{name}.absmax").int()
    nested = read_scales(checkpoint, f"{name}.nested_absmax")
    table = read_scales(checkpoint, f"{name}.nested_quant_map")
    return table[codes] * nested[torch.arange(len(codes)) // state.nested_block] + state.offset
