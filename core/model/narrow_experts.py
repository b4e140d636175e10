"""Experts as a GPU keeps them: in the bits that they are stored in, or quantised to.

Tests: tests/core/model/test_narrow_experts.py, tests/core/executors/test_cuda_quantised_experts_interpreted.py
"""

from __future__ import annotations

import torch

from ...ops.narrow_weights import FLOAT4_GROUP, NarrowWeight, is_kept, keep, keep_float4, kept_bits
from .quantization.group_scaled import GroupScaled
from .quantization.groups import evenly_grouped, with_signed_values


def expert_stays_narrow(matrix: GroupScaled) -> bool:
    """True if the kernel that multiplies all experts of a layer can multiply a matrix as it is stored.

    It goes by the bits that it is stored in, not by its values: experts of a layer must lie in memory alike.
    """
    _, group = evenly_grouped(matrix)
    inputs = matrix.values.shape[1]
    if matrix.mxfp4:
        return is_kept_float4(inputs) and group == min(FLOAT4_GROUP, inputs)
    return is_kept(inputs, kept_bits(matrix.bits), group)


def is_kept_float4(inputs: int) -> bool:
    """True if rows of so many inputs can be kept in MXFP4: four words hold 32 of them."""
    return not inputs % 32


def narrow_expert(matrix: GroupScaled, dtype: torch.dtype, device: torch.device) -> NarrowWeight:
    """A matrix of an expert on a device, for which `expert_stays_narrow` is true."""
    even, group = evenly_grouped(with_signed_values(matrix))
    scales = even.scales * even.factor
    if even.mxfp4:
        return keep_float4(even.values, scales * 2, dtype=dtype, device=device)
    bits = kept_bits(even.bits)
    return keep(even.values, scales, even.zeros, bits=bits, group=group, dtype=dtype, device=device)
