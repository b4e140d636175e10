"""Products by the kernel that fits the device.

Tests: tests/core/test_families.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import mm
from torch.nn.functional import linear

from ....ops.elementwise.elementwise import (
    silu_and_mul,
)
from ....ops.gemm import float8_rows
from ....ops.gemm.narrow_weights import NarrowWeight
from ....ops.gemm.packed_gemm import packed_linear
from ..batch import GemmBackend, GemmBackends, GemmKind
from ..weights.rounding_weight import RoundingWeight

if TYPE_CHECKING:
    from ....ops.lora.sgmv_triton import Shrunk

#: A weight of a GEMM, as a device or a CPU keeps it.
Weight = torch.Tensor | NarrowWeight | RoundingWeight


#: Spans of products with the base weights that don't have the product's name.
SPANS = {"qkv": "attn.qkv", "o": "attn.o", "gate_up": "mlp.gate_up", "down": "mlp.down"}


def backend_for(
    backends: GemmBackends,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    silu: bool = False,
    is_head: bool = False,
) -> GemmBackend:
    """The backend of a GEMM, among those of a step."""
    if not backends:
        return GemmBackend.LIBRARY
    return backends.get(kind_of(weight, bias, silu=silu, is_head=is_head), GemmBackend.LIBRARY)


def kind_of(weight: Weight, bias: torch.Tensor | None = None, *, silu: bool = False, is_head: bool = False) -> GemmKind:
    """The kind of a GEMM with a weight `[outputs, inputs]`, or with those of experts `[experts, outputs, inputs]`."""
    weight = weight.weight if isinstance(weight, RoundingWeight) else weight
    form = str(weight.dtype).removeprefix("torch.")
    if isinstance(weight, NarrowWeight):
        name = "MXFP4" if weight.float4 else "FP8" if weight.float8 else f"int{weight.bits}"
        form = f"{name} in groups of {weight.group}"
        form += " with zeros" * (weight.zeros is not None) + ", rounds inputs" * weight.rounds_inputs
    *experts, outputs, inputs = weight.shape
    count, is_narrow = experts[0] if experts else 0, isinstance(weight, NarrowWeight)
    is_float4 = isinstance(weight, NarrowWeight) and weight.float4
    return GemmKind(outputs, inputs, form, bias is not None, silu, is_head, count, is_narrow, is_float4)


def multiply(
    backend: GemmBackend,
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    gate: bool = False,
    shrunk: Shrunk | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """`x @ weightᵀ + bias`. x: `[rows, in]`, weight: `[out, in]`; a narrow one is widened in memory for the
    library, and x is rounded for one that says so. gate: `silu(gate) · up` of the halves of that, the
    same bits as one after the other of the same way. shrunk: of adapters that are expanded in the product's launch.
    out: where the product is written, contiguous, in x's dtype; without a bias and a gate.
    """
    if isinstance(weight, RoundingWeight):
        x, weight = weight.inputs(x), weight.weight
    if isinstance(weight, NarrowWeight) and weight.rounds_inputs and backend is not GemmBackend.LIBRARY:
        x = float8_rows.rounded(x)
    if backend in (GemmBackend.SMALL, GemmBackend.EXPANDED, GemmBackend.SPLIT):
        from ....ops.gemm import small_gemm_triton, split_gemm_triton  # need triton

        if backend is GemmBackend.SPLIT and isinstance(weight, torch.Tensor):
            return split_gemm_triton.multiply(x, weight, bias)
        return small_gemm_triton.multiply(x, weight, bias, silu=gate, shrunk=shrunk, out=out)
    if backend is GemmBackend.SWAPPED and isinstance(weight, NarrowWeight):
        from ....ops.gemm import swapped_gemm_triton  # needs triton

        y = swapped_gemm_triton.multiply(x, weight, bias)
    else:
        y = _multiply_by_library(x, weight, bias, out)
    y = silu_and_mul(y) if gate else y
    return y if out is None or y is out else out.copy_(y)


def _multiply_by_library(
    x: torch.Tensor, weight: torch.Tensor | NarrowWeight, bias: torch.Tensor | None, out: torch.Tensor | None
) -> torch.Tensor:
    """out: see `multiply`; left alone where the library can't write there."""
    if isinstance(weight, NarrowWeight):
        if weight.rounds_inputs:
            return float8_rows.multiply(x, weight, bias)
        weight = weight.dense()
    if weight.is_mkldnn:
        return packed_linear(x, weight, bias)
    return linear(x, weight, bias) if out is None else mm(x, weight.t(), out=out)
