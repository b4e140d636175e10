"""Values of an adapter's tensors, read from its file, or computed from those in it.

Tests: tests/memory/files/test_adapter_forms.py, tests/memory/files/methods/test_methods.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .tensor_file import TensorFile
from .tensor_info import TensorInfo

if TYPE_CHECKING:
    import torch


def read_values(file: TensorFile, info: TensorInfo, buffer: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor in the file's element type, or in float32 if it is computed. It may be a view of `buffer`, bytes, which
    is used if it is large enough.
    """
    values = _read(file, info, buffer) if info.computed is None else _compute(file, info)
    return values.view(info.shape) if info.arrangement is None else _arranged(info, values)


def _arranged(info: TensorInfo, values: torch.Tensor) -> torch.Tensor:
    assert info.arrangement is not None
    return info.arrangement.of(values, info.shape[0]).reshape(info.shape)


def _read(file: TensorFile, info: TensorInfo, buffer: torch.Tensor | None) -> torch.Tensor:
    """Flat values."""
    import torch

    if buffer is None or info.num_bytes > len(buffer):  # larger: of a matrix that several projections share
        buffer = torch.empty(info.num_bytes, dtype=torch.uint8)
    data = buffer[: info.num_bytes]
    file.read_into(data.numpy().data, info.offset)
    return data.view({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}[info.dtype])


def _compute(file: TensorFile, info: TensorInfo) -> torch.Tensor:
    """Likewise."""
    assert info.computed is not None
    parts = (read_values(file, part).float() for part in info.computed.parts)
    return info.computed.formula.of(*parts).reshape(-1)
