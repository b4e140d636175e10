"""A layer's experts in stacks on a GPU: one launch multiplies all of them, and the host never learns where rows go.

Tests: tests/ops/moe/test_routing_interpreted.py, tests/core/executors/test_cuda_experts_interpreted.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ....memory.pages.projections import Role
from ....ops.elementwise.elementwise_schedule import Gating
from ....ops.gemm import narrow_weights
from ....ops.gemm.narrow_weights import NarrowWeight
from ....ops.moe.expert_tiles import ExpertTiles, Stack
from ....ops.moe.expert_tiles_schedule import UNSORTED_ROWS, ExpertLaunches, Gate
from ....ops.moe.routing_schedule import choice_constants
from ..specs.feed_forward import (
    Activation,
    BoundedSwiglu,
    ClampedSwiglu,
    ExpertActivation,
    Experts,
    LimitedSwiglu,
    Routing,
    UngatedActivation,
)
from .experts import APART, ExpertChoice, ExpertWeights, SharedOutputs, activated, lora_of
from .mixture_launches import MixtureLaunches
from .mixture_lora import MixtureLora


@dataclass(slots=True, kw_only=True)
class StackedExperts(ExpertWeights):
    """A layer's experts in one tensor, for a kernel that multiplies all of them in one launch, on a GPU. The host never
    learns which experts are chosen.
    """

    gate_up: Stack
    """Of each expert `[2·size, hidden]`, with its biases."""

    down: Stack
    """Of each expert `[hidden, size]`, with its biases."""

    def can_join(self, spec: Experts) -> bool:
        """Whether `outputs` has launches to join for many rows, too."""
        return _gate_of(spec.activation) is not None and not spec.routing.of_inputs

    # These modules need triton.

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        from ....ops.moe import routing_triton

        assert isinstance(self.router, torch.Tensor), "a GPU's router is not packed"
        return routing_triton.logits(x, self.router, self.router_bias)

    def shared_gates(self, x: torch.Tensor) -> torch.Tensor:
        from ....ops.moe import routing_triton

        assert self.shared_gate is not None, "the shared expert has gates"
        return routing_triton.logits(x, self.shared_gate)

    def choose(self, logits: torch.Tensor, routing: Routing) -> ExpertChoice:
        from ....ops.moe import routing_triton

        constants = choice_constants(routing, logits.shape[1])
        return ExpertChoice(*routing_triton.choose(logits, self.correction, constants))

    def add_up(self, outputs: torch.Tensor, weights: torch.Tensor, shared: SharedOutputs | None) -> torch.Tensor:
        from ....ops.moe import routing_triton

        return routing_triton.add_up(outputs, weights, *(shared or ()))

    def outputs(
        self,
        x: torch.Tensor,
        chosen: torch.Tensor,
        spec: Experts,
        lora: MixtureLora | MixtureLaunches | None = None,
        factors: torch.Tensor | None = None,
        *,
        launches: ExpertLaunches = APART,
    ) -> torch.Tensor:
        from ....ops.moe import expert_tiles_triton
        from ....ops.moe.routing_triton import tiles_of

        multiply = partial(expert_tiles_triton.multiply, swaps=launches.swaps, is_wide=launches.is_wide)
        per_token, of_adapters = spec.routing.per_token, lora_of(lora, MixtureLaunches)
        added = None if of_adapters is None else of_adapters.routed(chosen)
        if launches.joins and len(chosen) <= UNSORTED_ROWS and (added is None or not added.has_runs):
            tiles = ExpertTiles.unsorted(chosen)
        else:
            tiles = tiles_of(chosen, spec.count, self.gate_up, self.down)
        if added is None:
            gate = _gate_of(spec.activation) if launches.joins and factors is None else None
            hidden = multiply(x, self.gate_up, tiles, per_token, gate)
            if factors is not None:
                hidden.mul_(factors.view(-1, 1))
            return multiply(hidden if gate else activated(hidden, spec.activation), self.down, tiles, 1)
        x, tiles = added.gathered(x), added.in_rows(tiles)
        y = multiply(x, self.gate_up, tiles, 1)
        added.add(Role.EXPERT_GATE_UP, y, x)
        if factors is not None:
            y.mul_(added.in_order(factors.view(-1, 1)))
        hidden = activated(y, spec.activation)
        y = multiply(hidden, self.down, tiles, 1)
        added.add(Role.EXPERT_DOWN, y, hidden)
        return added.by_pair(y)


def _gate_of(activation: ExpertActivation) -> Gate | None:
    """The activation as the launch of gate and up computes it; None: it does not."""
    match activation:
        case ClampedSwiglu(alpha, limit):
            return Gate(Gating.CLAMPED_SWIGLU, alpha, limit)
        case Activation.SILU:
            return Gate(Gating.SILU)
        case Activation.GELU_TANH:
            return Gate(Gating.GELU)
        case Activation.RELU_SQUARED | Activation.GELU | BoundedSwiglu() | LimitedSwiglu() | UngatedActivation():
            return None


def stacked(
    matrices: list[torch.Tensor | NarrowWeight],
    biases: Sequence[torch.Tensor] | None,
    dtype: torch.dtype,
    device: torch.device,
) -> Stack:
    """Matrices of experts in one tensor, narrow if all of them are, with their biases."""
    bias = None if biases is None else torch.stack(list(biases)).to(device, dtype)
    narrow = [each for each in matrices if isinstance(each, NarrowWeight)]
    if len(narrow) == len(matrices) and (data := narrow_weights.stack(narrow)) is not None:
        return Stack(data, bias)
    dense = torch.empty((len(matrices), *matrices[0].shape), dtype=dtype, device=device)
    for place, weight in zip(dense, matrices, strict=True):
        place.copy_(dense_of(weight))
    return Stack(dense, bias)


def dense_of(weight: torch.Tensor | NarrowWeight) -> torch.Tensor:
    return weight.dense() if isinstance(weight, NarrowWeight) else weight
