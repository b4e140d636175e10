"""Readers that schemes share, of parts of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...config_json import UnsupportedModel
from .group_scaled import row_chunks

if TYPE_CHECKING:
    import torch

    from ..checkpoint import Checkpoint

REMEDY = "download or quantise the checkpoint again"


def read_scales(checkpoint: Checkpoint, name: str, part: Sequence[slice] = ()) -> torch.Tensor:
    """Part of a tensor of scales in float32. Raises UnsupportedModel if one is not finite."""
    scales = checkpoint.read(name, part).float()
    if not bool(scales.isfinite().all()):
        raise UnsupportedModel(
            f"{checkpoint[name].path}: tensor {name} has scales that are not finite numbers; {REMEDY}"
        )
    return scales


def check_float8(checkpoint: Checkpoint, name: str, values: torch.Tensor) -> None:
    """Raise UnsupportedModel if one of some rows (float8_e4m3fn) of tensor `name` is NaN.

    A GPU that keeps the bits would multiply by 480 where dequantised weights are NaN.
    """
    import torch

    stored = values.view(torch.uint8)
    if any(bool(((stored[rows] & 0x7F) == 0x7F).any()) for rows in row_chunks(stored)):
        raise UnsupportedModel(f"{checkpoint[name].path}: tensor {name} has weights that are NaN; {REMEDY}")


def check_range(checkpoint: Checkpoint, name: str, values: torch.Tensor, least: int, most: int) -> None:
    """Raise UnsupportedModel unless all values of tensor `name` are within `least … most`."""
    low, high = (int(each) for each in values.aminmax()) if values.numel() else (least, most)
    if low < least or high > most:
        found = low if low < least else high
        raise UnsupportedModel(
            f"{checkpoint[name].path}: tensor {name} has the value {found}, allowed are {least} to {most}; {REMEDY}"
        )
