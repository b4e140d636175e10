"""Ops that only some models have, in the torch interpreter.

Tests: tests/core/test_families.py
"""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ....ops.elementwise import elementwise
from ....ops.elementwise.sparse_gates import sparse_gates as with_sparse_gates
from ....ops.moe.expert_tiles_schedule import ExpertLaunches
from ..batch import GemmBackend, GemmKind
from ..moe.experts import ExpertWeights, lora_of, mix_by_modality, mix_experts
from ..moe.experts import shared_expert as of_shared
from ..moe.mixture_lora import MixtureLora
from ..moe.stacked_experts import StackedExperts
from ..nvtx_spans import span
from ..weights.slots import IMAGE_EXPERTS
from .layer_program import Kept
from .ops import (
    AddMedia,
    Clip,
    Concat,
    GateOutput,
    GrowHeads,
    Mix,
    Moe,
    Replace,
    ResizeHeads,
    Scale,
    SharedExpert,
    SparseGates,
    SubtractHeads,
    Sum,
    TakeGates,
)
from .torch_ops import kind_of
from .torch_step import OpContext, Run, Step, reader


def gate_output(op: GateOutput, _: OpContext) -> Run:
    def run(step: Step) -> None:
        names = step.names
        gates = names[op.gates]
        names[op.out] = elementwise.gate_output(names[op.x], gates, softplus=op.softplus)

    return run


def take_gates(op: TakeGates, _: OpContext) -> Run:
    read = reader(op.x)

    def run(step: Step) -> None:
        gates = read(step.names).unflatten(1, (op.heads, -1))[..., -op.width :]
        step.names[op.out] = gates.expand(-1, -1, op.width).flatten(1)

    return run


def grow_heads(op: GrowHeads, at: OpContext) -> Run:
    read, index, slot = reader(op.x), at.index, op.weight

    def run(step: Step) -> None:
        x, (scale, bias) = read(step.names), step.layers[index][slot].view(2, -1)
        logarithms = (step.batch.positions + 1).float().log().to(x.dtype)
        factors = logarithms[:, None] * scale + bias
        step.names[op.out] = (x.unflatten(1, (op.heads, -1)) * factors[..., None]).flatten(1)

    return run


def mix(op: Mix, at: OpContext) -> Run:
    read, index, kept, model = reader(op.x), at.index, Kept(op.out, (op.out_size,)), at.model

    def run(step: Step) -> None:
        states = step.states
        if states is None:
            raise RuntimeError(f"layer {index} has a recurrent mixer, and the step has no states for it")
        weights = at.weights[op.weights]
        with span("recurrent.run"):
            y = states.mix(index, read(step.names), weights.first if op.is_first else weights, model.ranks)
        out = step.kept.get(kept)
        step.names[op.out] = y if out is None else out.copy_(y)

    return run


def concat(op: Concat, _: OpContext) -> Run:
    reads = [reader(part) for part in op.parts]

    def run(step: Step) -> None:
        step.names[op.out] = torch.cat([read(step.names) for read in reads], 1)

    return run


def resize_heads(op: ResizeHeads, at: OpContext) -> Run:
    read = reader(op.x)
    order = torch.tensor(op.order, device=at.model.device) if op.order else None

    def run(step: Step) -> None:
        kept, heads = read(step.names).flatten(1).tensor_split((op.begin,), 1)
        heads = heads.unflatten(1, (-1, op.width))
        heads = heads if order is None else heads.index_select(1, order)
        step.names[op.out] = torch.cat((kept, pad(heads, (0, op.to - op.width)).flatten(1)), 1)

    return run


def subtract_heads(op: SubtractHeads, at: OpContext) -> Run:
    spec, width = op.difference, op.attention.head_dim
    factor = spec.factor(at.weights[op.factors])
    weight = torch.ones(width, dtype=factor.dtype, device=factor.device)

    def run(step: Step) -> None:
        first, second = step.names[op.x].flatten(1).unflatten(1, (2, -1, width)).unbind(1)
        y = (first - factor * second).flatten(0, 1)
        y = elementwise.rms_norm(y, weight, op.eps) * (1 - spec.first)
        step.names[op.out] = y.view(len(first), -1)

    return run


def sparse_gates(op: SparseGates, at: OpContext) -> Run:
    model = at.model

    def run(step: Step) -> None:
        step.names[op.out] = with_sparse_gates(step.names[op.x], op.sparsity, model.ranks)

    return run


def kind_of_experts(experts: ExpertWeights) -> GemmKind | None:
    """The kind of GEMM of the experts' gate and up, by which backends are chosen; None: our kernels don't run it."""
    return kind_of(experts.gate_up.data, experts.gate_up.bias) if isinstance(experts, StackedExperts) else None


def backend_of(step: Step, experts: ExpertWeights) -> GemmBackend:
    """The backend of a mixture in a step."""
    backends = step.batch.backends
    kind = kind_of_experts(experts) if backends else None
    return GemmBackend.LIBRARY if kind is None else backends.get(kind, GemmBackend.LIBRARY)


def _launches(backend: GemmBackend) -> ExpertLaunches:
    """Those of a mixture."""
    is_wide = backend is GemmBackend.WIDE
    joins, swaps = backend is not GemmBackend.LIBRARY, is_wide or backend is GemmBackend.SWAPPED
    return ExpertLaunches(joins=joins, swaps=swaps, is_wide=is_wide)


def moe(op: Moe, at: OpContext) -> Run:
    read, index, spec = reader(op.x), at.index, op.spec
    routed_of = None if op.routed is None else reader(op.routed)

    def run(step: Step) -> None:
        names, experts, lora = step.names, step.layers[index][op.experts], step.batch.lora
        added = None if lora is None else lora.mixture(index)
        routed = None if routed_of is None else routed_of(names)
        if spec.sees and (of_images := step.batch.image_tokens) is not None:
            both = experts, step.layers[index][IMAGE_EXPERTS]
            names[op.out] = mix_by_modality(read(names), both, spec, of_images, lora_of(added, MixtureLora))
            return
        launches = _launches(backend_of(step, experts))
        y = mix_experts(read(names), experts, spec, added, routed, launches=launches)
        bias = step.layers[index].get(op.bias)
        y = y if bias is None else y + bias
        out = step.kept.get(Kept(op.out, y.shape[1:]))
        names[op.out] = y if out is None else out.copy_(y)

    return run


def shared_expert(op: SharedExpert, at: OpContext) -> Run:
    read, index = reader(op.x), at.index

    def run(step: Step) -> None:
        experts, lora = step.layers[index][op.experts], step.batch.lora
        added = None if lora is None else lora.mixture(index)
        step.names[op.out] = of_shared(read(step.names), experts, op.spec, added)

    return run


def add_media(op: AddMedia, _: OpContext) -> Run:
    def run(step: Step) -> None:
        if (media := step.batch.media) is not None:
            x = step.names[op.x]
            x.index_add_(0, media.places.to(x.device), media.part(op.part, x.shape[1]).to(x.device, x.dtype))

    return run


def clip(op: Clip, _: OpContext) -> Run:
    def run(step: Step) -> None:
        step.names[op.x].clamp_(-op.limit, op.limit)

    return run


def replace(op: Replace, _: OpContext) -> Run:
    def run(step: Step) -> None:
        step.names[op.x].copy_(step.names[op.y])

    return run


def plus(op: Sum, _: OpContext) -> Run:
    def run(step: Step) -> None:
        step.names[op.out] = step.names[op.x] + step.names[op.y]

    return run


def scale(op: Scale, at: OpContext) -> Run:
    read, index, slot = reader(op.x), at.index, op.weight

    def run(step: Step) -> None:
        x = read(step.names)
        factor = op.factor if slot is None else step.layers[index][slot]
        if op.in_place:
            x.mul_(factor)
        else:
            step.names[op.out] = x * factor

    return run
