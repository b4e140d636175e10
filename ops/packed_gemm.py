"""Products on a CPU with weights that are packed for them.

oneDNN packs a weight into the blocks that its kernels read, once, for products of any number of rows; a plain weight is
reordered by the library, or read against its grain, in every product. Packed weights take no more memory.
"""

from __future__ import annotations

import torch

_PACKS = torch.backends.mkldnn.is_available()
_OPS = torch.ops.mkldnn  # torch's compiler calls these; they have no names of their own


def pack(weight: torch.Tensor) -> torch.Tensor:
    """Return a float32 weight `[out, in]` in oneDNN's own layout; as it is where torch was built without oneDNN."""
    return _OPS._reorder_linear_weight(weight, None) if _PACKS else weight  # noqa: SLF001


def unpack(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight row by row: a copy of a packed one."""
    return weight.to_dense() if weight.is_mkldnn else weight


def packed_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """`x @ weightᵀ + bias`. x: `[rows, in]`, weight: `[out, in]`, packed."""
    return _OPS._linear_pointwise(x, weight, bias, "none", [], "")  # noqa: SLF001
