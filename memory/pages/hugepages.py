"""Host tensors on huge pages, where the system grants them."""

from __future__ import annotations

import ctypes
import math
import mmap
import os
from collections.abc import Sequence

import torch

_WORTH_IT_BYTES = 4 << 20
_LINE_BYTES, _PIECE_BYTES = 64, 64 << 20
_PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}


def zeros(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Allocate a tensor of zeros whose memory is provided on first use; a large one asks for huge pages.

    Weights and pages are streamed once per step; with 4 KiB pages every row of a slab would miss the TLB.
    """
    return torch.frombuffer(map_memory(math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


def map_memory(num_bytes: int) -> mmap.mmap:
    """Map zeroed private memory, on huge pages if it is large and the system grants them."""
    try:
        mapping = mmap.mmap(-1, num_bytes, **_PRIVATE)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror} for {num_bytes} bytes") from None
    if num_bytes >= _WORTH_IT_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


def release(tensor: torch.Tensor) -> None:
    """Give the memory of a tensor of `zeros` back to the system, where it has a call for that; it is zeros again."""
    advise = getattr(mmap, "MADV_DONTNEED", None)
    if advise is None:
        tensor.zero_()
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), advise):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class Pieces:
    """Memory taken in large pieces, so that even small tensors lie on huge pages."""

    def __init__(self) -> None:
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor that begins on a cache line; nothing was written to it."""
        num_bytes = math.prod(shape) * dtype.itemsize
        room = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES
        if len(self._free) < room:  # the unused rest of the last piece was never touched, so it costs no memory
            self._free = zeros((max(room, _PIECE_BYTES),), torch.uint8)
        here, self._free = self._free[:num_bytes], self._free[room:]
        return here.view(dtype).view(*shape)
