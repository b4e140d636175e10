"""An adapter in a copy of a projection's weights, by torch: `W + Σ scale·B·A`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .sgmv import AdapterRows


def merge(
    origin: torch.Tensor,
    out: torch.Tensor,
    arena: torch.Tensor,
    layer: int,
    parts: Sequence[AdapterRows],
    modules: Sequence[tuple[int, int, int]],
) -> float:
    """Write the sum into out, added up in float32 and rounded once.

    origin, out: `[outputs, inputs]`, the weights of projections that share an input. modules: (module id, first row,
    number of rows) of each. Returns by how much the norm of a row grows, at most; infinity where a sum is not finite.
    """
    before = origin.float()
    after = before.clone()
    for part in parts:
        for module, first, count in modules:
            a, b = part.matrices(arena, layer, module, origin.shape[1], count)
            if a is not None and b is not None:
                after[first : first + count].addmm_(b.float().T, a.float(), alpha=part.scale)
    out.copy_(after)
    old, new = before.norm(dim=1), out.float().norm(dim=1)
    growth = torch.where(new == 0, 0.0, new / old)
    return float(growth.max()) if bool(growth.isfinite().all()) else float("inf")
