"""Mixtures of experts: functions with which layers write them. See `Experts`.

Tests: tests/core/model/program/test_golden.py, tests/core/model/program/test_builder.py
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ....memory.pages.projections import Projection, Role
from ..program.op import Read
from ..program.ops.moe import Moe, SharedExpert
from ..specs.feed_forward import Experts, LatentExperts
from ..specs.tensor_names import CORRECTION
from ..weights.layer_weights import PartWeights
from ..weights.slot import Keep, SlotTensor, bias_tensor, weight_tensor
from ..weights.slots import EXPERTS
from .build import Build, Proj, Value


def mixture(b: Build, spec: Experts, rows: Value, out: str = "y", routed: Read | None = None) -> Value:
    """What experts add up to. routed: what the router reads, if that is not what experts read."""
    if spec.latent is not None:
        return _of_latents(b, spec, spec.latent, rows, out)
    mixture_weights(b, spec)
    return b.reduce(b.put(Moe(rows, routed, out, spec), b.hidden))


def _of_latents(b: Build, spec: Experts, latent: LatentExperts, rows: Value, out: str) -> Value:
    """See `LatentExperts`."""
    mixture_weights(b, spec)
    low = b.linear("low_rank_down", rows, "l", Proj("mlp.pre_expert_proj", latent.size), merges=False)
    if latent.eps is not None:
        low = b.norm("latent_norm", low, "ln", path="mlp.pre_expert_norm")
        small(b, "out_norm", "mlp.experts.post_expert_norm.weight", latent.size)
    y = b.reduce(b.put(Moe(low, rows, out, spec), latent.size))
    y = b.linear("low_rank_up", y, out, Proj("mlp.post_expert_proj", b.hidden), merges=False)
    if not spec.shared_size:
        return y
    return b.sum(y, b.reduce(b.put(SharedExpert(rows, "sh", spec), b.hidden)), out)


def mixture_weights(b: Build, spec: Experts) -> None:
    """Declare the weights of a mixture, and its projections."""
    own = spec.projections(b.hidden)
    gate_up, down = (projections_of(own, role) for role in (Role.EXPERT_GATE_UP, Role.EXPERT_DOWN))
    b.adapted(*own)
    b.part(EXPERTS, listed_experts)
    _routing(b, spec)
    listed(b, Role.EXPERT_GATE_UP, gate_up, range(spec.count))
    listed(b, Role.EXPERT_DOWN, down, range(spec.count))
    for role in (Role.SHARED_GATE_UP, Role.SHARED_DOWN):
        if shared := projections_of(own, role):
            b.weight(role, *map(weight_tensor, shared), keep=Keep.EXPERT)
    if spec.biased:
        _biases(b, spec, gate_up, down)


def listed_experts(of: PartWeights) -> Any:
    """Experts one by one, as they are read: see `ListedExperts`."""
    from ..moe.listed_experts import ListedExperts

    return ListedExperts(**of.own)


def _routing(b: Build, spec: Experts) -> None:
    """Declare what chooses among experts."""
    small(b, "router", "mlp.gate.weight", spec.choices, spec.router_inputs(b.hidden))
    if spec.routing.bias:
        small(b, "router_bias", "mlp.gate.bias", spec.choices)
    if spec.routing.corrected:
        small(b, "correction", CORRECTION, spec.choices)
    if spec.routing.scaled:
        small(b, "factors", "router.per_expert_scale", spec.choices)
    if spec.shared_gate:
        small(b, "shared_gate", "mlp.shared_expert_gate.weight", 1, b.hidden)


def small(b: Build, name: str, path: str, *shape: int) -> None:
    """Declare what chooses among experts: float32 whatever the model's dtype."""
    b.weight(f"{EXPERTS}.{name}", SlotTensor(path, shape), keep=Keep.FLOAT32)


def projections_of(own: Sequence[Projection], role: Role) -> list[Projection]:
    """Those of a mixture's projections that are of one product."""
    return [each for each in own if each.product == role]


def listed(b: Build, name: str, own: Sequence[Projection], numbers: range, *, keep: Keep = Keep.EXPERT) -> None:
    """Declare a list of weights of experts with these numbers. own: projections of all of them."""
    tensors = _each_of(map(weight_tensor, own), numbers)
    b.weight(name, *tensors, keep=keep, count=len(numbers))


def _each_of(tensors: Iterable[SlotTensor], numbers: range) -> Iterator[SlotTensor]:
    whole = [*tensors]
    return (each.of_expert(number) for number in numbers for each in whole)


def _biases(b: Build, spec: Experts, gate_up: Sequence[Projection], down: Sequence[Projection]) -> None:
    """Declare biases of all experts; those of what ranks sum are the first rank's."""
    for name, own, is_sum in (("gate_up_bias", gate_up, False), ("down_bias", down, True)):
        tensors = _each_of(map(bias_tensor, own), range(spec.count))
        b.weight(f"{EXPERTS}.{name}", *tensors, first_rank=is_sum, count=spec.count)
