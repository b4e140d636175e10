"""Gates of which most become 0: those below a cutoff that follows from their mean and deviation.

Tests: tests/ops/elementwise/test_sparse_gates.py, tests/core/layers/test_streams.py
"""

from __future__ import annotations

from functools import cache

import torch

from ..ranks.ranks import Collectives


def sparse_gates(gate_up: torch.Tensor, sparsity: float, ranks: Collectives | None = None) -> torch.Tensor:
    """`[max(gate - cutoff, 0), up]` of `[tokens, 2·ffn]`, with the cutoff below which a share `sparsity` of a token's
    gates is if they are normally distributed. ranks: have equal shares of the gates.
    """
    gates, up = gate_up.float().chunk(2, 1)
    count = gates.shape[1] * (1 if ranks is None else ranks.size)
    mean = _summed(gates, ranks) / count
    deviation = (_summed((gates - mean).square(), ranks) / count).sqrt()
    kept = (gates - (mean + deviation * deviations(sparsity))).relu()
    return torch.cat((kept, up), 1).to(gate_up.dtype)


def _summed(values: torch.Tensor, ranks: Collectives | None) -> torch.Tensor:
    """`[tokens, 1]`: the sums of rows of all ranks' values."""
    total = values.sum(1, keepdim=True)
    return total if ranks is None else ranks.add_up(total)


@cache
def deviations(share: float) -> float:
    """How many deviations above the mean a share of a normal distribution is below, in float32."""
    return float(torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(share)))
