"""Dequantises blocks of GGUF files by all threads, in the formats that files of today have.

Tests: tests/ops/cpu/test_gguf_blocks.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..library.native_library import library

if TYPE_CHECKING:
    import numpy as np


def dequantised(stored: np.ndarray, kind: int, values: int, size: int) -> tuple[torch.Tensor, bool] | None:
    """The numbers of stored rows, `[..., columns]` float32, and whether all are finite: what the package gguf's
    `dequantize` makes of them, bit by bit. None: the native library is not in use, or does not have this format.

    stored: bytes `[..., bytes]`. kind: ggml's number of the format, of whose blocks each has this many values, and this
    size in bytes.
    """
    import numpy as np

    found = library()
    if found is None or stored.dtype != np.uint8:
        return None
    *rows, width = stored.shape
    blocks = np.ascontiguousarray(stored)
    numbers = torch.empty(*rows, width // size * values)
    finite = found.chorus_gguf_blocks(
        torch.get_num_threads(), kind, blocks.ctypes.data, blocks.size // size, numbers.data_ptr()
    )
    return None if finite < 0 else (numbers, bool(finite))
