"""Host tensors on huge pages, where the system grants them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence

import torch

_WORTH_IT_BYTES = 4 << 20
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised (zeroed when large) tensor; large ones are mapped with a plea for huge pages.

    Weights and pages are streamed once per step; with 4 KiB pages every row of a slab would miss the TLB.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if not _is_mapped(num_bytes):
        return torch.empty(*shape, dtype=dtype)
    return torch.frombuffer(map_memory(num_bytes), dtype=dtype).view(*shape)


def map_memory(num_bytes: int) -> mmap.mmap:
    """Zeroed memory of its own; when it is large, with a plea for huge pages."""
    mapping = mmap.mmap(-1, num_bytes, **_PRIVATE)
    if _is_mapped(num_bytes):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """As `empty`, of zeros."""
    if _is_mapped(math.prod(shape) * dtype.itemsize):
        return empty(shape, dtype)
    return torch.zeros(*shape, dtype=dtype)


def _is_mapped(num_bytes: int) -> bool:
    return num_bytes >= _WORTH_IT_BYTES and hasattr(mmap, "MADV_HUGEPAGE")
