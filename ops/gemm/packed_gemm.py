"""GEMMs on a CPU with weights packed for them.

oneDNN packs a weight once into the blocks that its kernels read, for GEMMs of any number of rows. With a plain weight,
every GEMM reorders it or reads it inefficiently. Packed weights take no more memory.
"""

from __future__ import annotations

from functools import cache

import torch

_PACKS = torch.backends.mkldnn.is_available()
_OPS = torch.ops.mkldnn  # torch's compiler calls these; they have no public names


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight `[out, in]` of float32 or bfloat16 in oneDNN's own layout; unchanged if torch was built without
    oneDNN, or it has no products of the dtype on this processor.
    """
    return _OPS._reorder_linear_weight(weight, None) if _packs(weight.dtype) else weight  # noqa: SLF001


@cache
def _packs(dtype: torch.dtype) -> bool:
    if dtype == torch.bfloat16:
        return _PACKS and _OPS._is_mkldnn_bf16_supported()  # noqa: SLF001
    return _PACKS and dtype == torch.float32


def unpack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight in row-major order: a copy if it was packed."""
    return weight.to_dense() if weight.is_mkldnn else weight


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weightᵀ + bias`. x: `[rows, in]`, weight: `[out, in]`, packed."""
    return _OPS._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
