"""GEMMs in the torch interpreter: with weights of every form, by the backend of the step, and with what adapters add.

Tests: tests/core/test_families.py, tests/core/executors/test_cuda_interpreted.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import linear

from ....memory.pages.projections import LAYER_GROUPS
from ....ops.elementwise.elementwise import silu_and_mul
from ....ops.gemm import float8_rows
from ....ops.gemm.narrow_weights import NarrowWeight
from ....ops.gemm.packed_gemm import packed_linear
from ..batch import GemmBackend, GemmBackends, GemmKind
from ..lora.step_lora import ATTN_O, DOWN, GATE_UP, QKV
from ..nvtx_spans import span
from ..weights.rounding_weight import RoundingWeight
from .ops import Gemm
from .torch_step import OpContext, Run, Step, reader

if TYPE_CHECKING:
    from ....ops.lora.sgmv_triton import Shrunk

#: A weight of a GEMM, as a device or a CPU keeps it.
Weight = torch.Tensor | NarrowWeight | RoundingWeight

#: Spans of the groups of projections, with the base weights and with adapters.
_SPANS = {
    QKV: ("attn.qkv", "lora.qkv"),
    ATTN_O: ("attn.o", "lora.o"),
    GATE_UP: ("mlp.gate_up", "lora.gate_up"),
    DOWN: ("mlp.down", "lora.down"),
}


def gemm(op: Gemm, at: OpContext) -> Run:
    """A GEMM with what adapters add, gated or not; in one launch but for shrink where the backend has that."""
    read, index, slot, bias_slot, out, silu = reader(op.x), at.index, op.weight, op.bias, op.out, op.silu
    group, offloads = int(op.group), op.group in LAYER_GROUPS
    base_name, lora_name = _SPANS.get(group, (op.group.name.lower(), f"lora.{op.group.name.lower()}"))

    def run(step: Step) -> None:
        names, weights, lora, shrunk = step.names, step.layers[index], step.batch.lora, None
        x, weight, bias = read(names), weights[slot], weights.get(bias_slot)
        backend = backend_for(step.batch.backends, weight, bias, silu=silu)
        if lora is not None:
            if offloads:
                lora.offload(group, x, index)
            if backend is GemmBackend.EXPANDED:
                with span(lora_name):
                    shrunk = lora.shrink(group, x, index)
        is_added = lora is None or shrunk is not None
        with span(base_name):
            y = multiply(backend, x, weight, bias, gate=silu and is_added, shrunk=shrunk)
        if lora is not None and shrunk is None:
            with span(lora_name):
                lora.add(group, y, x, index)
            y = silu_and_mul(y) if silu else y
        names[out] = y

    return run


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
    """The kind of a GEMM with a weight `[outputs, inputs]`."""
    weight = weight.weight if isinstance(weight, RoundingWeight) else weight
    form = str(weight.dtype).removeprefix("torch.")
    if isinstance(weight, NarrowWeight):
        name = "MXFP4" if weight.float4 else "FP8" if weight.float8 else f"int{weight.bits}"
        form = f"{name} in groups of {weight.group}"
        form += " with zeros" * (weight.zeros is not None) + ", rounds inputs" * weight.rounds_inputs
    outputs, inputs = weight.shape
    return GemmKind(outputs, inputs, form, bias is not None, silu, is_head)


def multiply(
    backend: GemmBackend,
    x: torch.Tensor,
    weight: Weight,
    bias: torch.Tensor | None = None,
    *,
    gate: bool = False,
    shrunk: Shrunk | None = None,
) -> torch.Tensor:
    """`x @ weightᵀ + bias`. x: `[rows, in]`, weight: `[out, in]`; a narrow one is widened in memory for the
    library, and x is rounded for one that says so. gate: `silu(gate) · up` of the halves of that, the
    same bits as one after the other of the same way. shrunk: of adapters that are expanded in the product's launch.
    """
    if isinstance(weight, RoundingWeight):
        x, weight = weight.inputs(x), weight.weight
    if isinstance(weight, NarrowWeight) and weight.rounds_inputs:
        if backend is GemmBackend.LIBRARY:
            y = float8_rows.multiply(x, weight, bias)
            return silu_and_mul(y) if gate else y
        x = float8_rows.rounded(x)
    if backend is GemmBackend.LIBRARY:
        weight = weight.dense() if isinstance(weight, NarrowWeight) else weight
        y = (packed_linear if weight.is_mkldnn else linear)(x, weight, bias)
        return silu_and_mul(y) if gate else y
    from ....ops.gemm import small_gemm_triton  # needs triton

    return small_gemm_triton.multiply(x, weight, bias, silu=gate, shrunk=shrunk)
