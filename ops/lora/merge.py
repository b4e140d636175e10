"""Merging an adapter into a copy of a projection's weights, by torch: `W + Σ scale·B·A`, its outputs scaled by the
adapter's vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sgmv import AdapterRows
from .vectors import vectors_of

#: The least scale of an output: with less, what is merged can't be taken off again.
_LEAST_SCALE = 1e-6

#: Elements that are summed at once: on a GPU 64 MiB of float32, for any matrix.
_CHUNK_ELEMS = 1 << 24


def merge(
    origin: torch.Tensor,
    out: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    parts: Sequence[AdapterRows],
    modules: Sequence[tuple[int, int, int]],
) -> float:
    """Write the sum into out, computed in float32 and rounded once.

    origin, out: `[outputs, inputs]`, the weights of projections that share an input. modules: (module id, first row,
    number of rows) of each. Returns the largest factor by which the norm of a row grows; infinity if a sum is not
    finite. The host waits for the device once, and temporary memory does not grow with the matrix.
    """
    num_rows, width = origin.shape
    terms, scales = [], []
    for part in parts:
        for module, first, count in modules:
            if (found := vectors_of(part, arena, layer, module, count)) is not None:
                scales.append((first, first + count, found[0][:, None]))
            a, b = part.matrices(arena, layer, module, width, count)
            if a is not None and b is not None:
                terms.append((first, first + count, b.float(), a.float(), part.scale))
    step = max(1, _CHUNK_ELEMS // width)
    growths = []
    for begin in range(0, num_rows, step):
        end = min(begin + step, num_rows)
        total = origin[begin:end].to(torch.float32, copy=True)
        old = total.norm(dim=1)
        for first, last, b, a, scale in terms:
            low, high = max(first, begin), min(last, end)
            if low < high:
                total[low - begin : high - begin].addmm_(b[:, low - first : high - first].T, a, alpha=scale)
        for first, last, scale in scales:
            low, high = max(first, begin), min(last, end)
            if low < high:
                total[low - begin : high - begin].mul_(scale[low - first : high - first])
        out[begin:end].copy_(total)
        new = out[begin:end].float().norm(dim=1)
        growth = torch.where(new == 0, 0.0, new / old)
        growths.append(torch.where(growth.isfinite(), growth, torch.inf).max())
    growths += [torch.where(scale.abs() < _LEAST_SCALE, torch.inf, 0.0).max() for _, _, scale in scales]
    return float(torch.stack(growths).max())
