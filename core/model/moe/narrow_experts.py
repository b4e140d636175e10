"""Matrices as a GPU keeps them narrow: in the bits that they are stored in, or quantised to.

Tests: tests/core/model/moe/test_narrow_experts.py, tests/core/executors/test_cuda_quantised_experts_interpreted.py
"""

from __future__ import annotations

import torch

from ....ops.gemm.narrow_weights import NarrowWeight, keep, keep_float4, kept_bits
from ..checkpoints.quantization.group_scaled import GroupScaled
from ..checkpoints.quantization.groups import evenly_grouped, with_signed_values


def narrow_expert(matrix: GroupScaled, dtype: torch.dtype, device: torch.device) -> NarrowWeight:
    """A matrix of an expert on a device, which a plan keeps narrow."""
    even, group = evenly_grouped(with_signed_values(matrix))
    return kept_narrow(even, kept_bits(even.bits), group, dtype, device)


def kept_narrow(even: GroupScaled, bits: int, group: int, dtype: torch.dtype, device: torch.device) -> NarrowWeight:
    """A matrix in even groups with signed values, in so many bits, or in MXFP4 if it is stored so."""
    scales = even.scales * even.factor
    if even.mxfp4:
        return keep_float4(even.values, scales * 2, dtype=dtype, device=device)
    return keep(even.values, scales, even.zeros, bits=bits, group=group, dtype=dtype, device=device)
