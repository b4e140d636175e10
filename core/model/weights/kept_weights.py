"""How a decoder keeps the weights that it reads: packed, narrow or dense, on its device.

Tests: tests/core/model/weights/test_narrow_bytes.py, tests/core/executors/test_cuda_float8_gemms.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ....memory.pages import hugepages
from ....ops.gemm.narrow_weights import NarrowWeight
from ....ops.gemm.packed_gemm import pack
from ....ops.library import native_library
from ....ops.moe import expert_gemms
from ..checkpoints.quantization.group_scaled import GroupScaled
from ..checkpoints.quantization.groups import (
    evenly_grouped,
    is_packable,
    pack_scaled,
    plain,
    with_signed_values,
)
from ..checkpoints.quantization.rounded_inputs import Float8Inputs, RoundedInputs
from ..moe.experts import ExpertKernels, ExpertPack
from ..moe.listed import ListedWeights
from ..moe.narrow_experts import kept_narrow, narrow_expert
from ..specs.norms import NormSpec
from .layer_weights import LayerWeights
from .rounding_weight import RoundingWeight
from .slot import Keep, Slot
from .weight_plan import PACKED, Way, WeightPlan
from .weights import Pack

#: Converts a layer's experts after each of their matrices was packed.
KeepExperts = Callable[[ListedWeights], Any]


def matrix_pack(plan: WeightPlan, device: torch.device, dtype: torch.dtype, *, packs: bool) -> Pack | None:
    """The function that converts each matrix after it was read; None: they stay as they were read."""
    if plan.rounds_inputs:
        return partial(_rounding, dtype=dtype, packs=packs)
    if packs:
        return lambda weight: pack(plain(weight, dtype).float())
    if plan.matrices is Way.NARROW:
        return partial(_narrowed, plan=plan, dtype=dtype, device=device)
    if device.type == "cpu":
        return None
    return lambda weight: plain(weight, dtype).to(device)  # the next one is read into the same memory


def _rounding(weight: torch.Tensor | GroupScaled, dtype: torch.dtype, *, packs: bool) -> torch.Tensor | RoundingWeight:
    """A dequantised projection on a CPU. packs: in float32, and packed."""
    dense = plain(weight, dtype)
    dense = pack(dense.float()) if packs else dense.clone() if dense is weight else dense
    if not isinstance(weight, GroupScaled) or not isinstance(weight.inputs, RoundedInputs) or not is_packable(weight):
        return dense
    _, group = evenly_grouped(weight)
    return RoundingWeight(dense, weight.inputs.within(group, weight.values.shape[1]))


def _narrowed(
    weight: torch.Tensor | GroupScaled, plan: WeightPlan, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | NarrowWeight:
    """A projection on a device: narrow if it is stored so, in groups that kernels can multiply."""
    if not isinstance(weight, GroupScaled):
        return weight.to(device, copy=True)  # the next one is read into the same memory
    even, group = evenly_grouped(with_signed_values(weight))
    if not (bits := plan.of_values(even).bits):
        return plain(weight, dtype).to(device)
    kept = kept_narrow(even, bits, group, dtype, device)
    return replace(kept, rounds_inputs=plan.float8_inputs and isinstance(even.inputs, Float8Inputs))


def moved(
    layer: LayerWeights,
    own: Sequence[Slot],
    norm: NormSpec,
    device: torch.device,
    dtype: torch.dtype,
    keep_experts: KeepExperts,
) -> LayerWeights:
    """The layer, with every part in `dtype` on `device`; the same tensors where they are that. own: its slots."""
    keeps = {slot.name: slot.keep for slot in own}

    def kept(name: str, part: Any) -> Any:
        match keeps.get(name):
            case None:
                return keep_experts(part) if isinstance(part, ListedWeights) else part.to(device)
            case Keep.FLOAT32:
                return part.to(device)
            case Keep.TABLE:
                return part
            case Keep.NORM:
                return moved_norm(part, norm, device, dtype)
        if isinstance(part, NarrowWeight | RoundingWeight) or part.is_mkldnn:
            return part
        return part.to(device, dtype)

    return {name: kept(name, part) for name, part in layer.items()}


def moved_norm(weight: torch.Tensor, norm: NormSpec, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    return weight.to(device) if norm.wide else weight.to(device, dtype)


def _stacked(experts: ListedWeights, dtype: torch.dtype, device: torch.device) -> Any:
    return experts.stacked(dtype, device)


def _packed(experts: ListedWeights, dtype: torch.dtype) -> Any:
    return experts.packed(dtype)


def expert_packs(
    kernels: ExpertKernels, plan: WeightPlan, dtype: torch.dtype, device: torch.device
) -> tuple[ExpertPack | None, KeepExperts]:
    """What packs each matrix of experts after it was read, and the function that then converts a layer's experts."""
    if kernels is ExpertKernels.TILES:
        narrow = partial(narrow_expert, dtype=dtype, device=device)
        is_narrow = plan.experts is Way.NARROW
        read = ExpertPack(dtype, lambda weight: weight, narrow, plan.reads_expert) if is_narrow else None
        return read, partial(_stacked, dtype=dtype, device=device)
    keep = partial(_packed, dtype=dtype)
    if kernels is ExpertKernels.TORCH:
        return ExpertPack(dtype, pack), keep
    take = hugepages.Pieces().take
    pack_matrix, pack_integers = partial(expert_gemms.pack, take=take), partial(pack_scaled, take=take)
    reads = PACKED.reads_expert if native_library.available(dtype) else None
    return ExpertPack(dtype, pack_matrix, pack_integers, reads), keep
