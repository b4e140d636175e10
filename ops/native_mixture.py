"""A layer's mixture of experts by the native library: in one call, or part by part, with adapters in between.

Tests: tests/ops/test_native_mixture.py, tests/core/model/test_experts.py
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof, c_void_p
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch

from .expert_products import Panels
from .native_descriptors import (
    ELEMENT_OF,
    ExpertMatricesDescriptor,
    IntegersDescriptor,
    MixtureDescriptor,
    MixtureStepDescriptor,
    NativeActivation,
    NativeScoring,
    RoutingDescriptor,
)
from .native_integers import IntegerPanels, described_integers
from .native_library import library


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeRouting:
    """Which experts a row goes to, and their weights: see `core.model.layers.Routing`."""

    per_token: int
    scoring: NativeScoring
    renormalised: bool
    epsilon: float
    factor: float
    groups: int
    kept_groups: int


@dataclass(frozen=True, slots=True)
class NativeGating:
    """What becomes of gate and up. alpha, limit: of a clamped SwiGLU."""

    activation: NativeActivation
    alpha: float = 0.0
    limit: float = 0.0


@dataclass(frozen=True, slots=True)
class NativeExperts:
    """Experts of one shape, each with a product for gate and up and one for down."""

    gate_up: Sequence[Panels | IntegerPanels]
    """Of each `[2·size, hidden]`."""
    down: Sequence[Panels | IntegerPanels]
    """Of each `[hidden, size]`."""
    gate_up_bias: Sequence[torch.Tensor] | None = None
    """Of each `[2·size]`."""
    down_bias: Sequence[torch.Tensor] | None = None
    """Of each `[hidden]`."""


class MixturePart(IntEnum):
    """Part of a step. After each, adapters may be added to what it computed."""

    ROUTE = 0
    """Computes `logits` and `shared_gates`."""
    GATE_UP = 1
    """Chooses experts; computes `gate_up` and `shared_gate_up`."""
    DOWN = 2
    """Applies the activation; computes `outputs` and `shared_outputs`."""
    COMBINE = 3
    """Computes `y`."""


class NativeMixture:
    """A layer's router, experts and shared expert, in the library's form."""

    def __init__(
        self,
        router: Panels,
        experts: NativeExperts,
        routing: NativeRouting,
        gating: NativeGating,
        *,
        router_bias: torch.Tensor | None = None,
        correction: torch.Tensor | None = None,
        shared: NativeExperts | None = None,
        shared_gate: torch.Tensor | None = None,
    ) -> None:
        """router: of float32, `[experts, hidden]`. router_bias, correction: `[experts]`. shared: one expert that every
        row goes to. shared_gate: `[1, hidden]`, of its output.
        """
        if router.data.dtype != torch.float32:
            raise ValueError(f"a router's weights are of {router.data.dtype}; they must be of float32")
        self.hidden, self.count = router.inputs, router.outputs
        self.size = experts.down[0].inputs
        self.per_token = routing.per_token
        self.shared_size = 0 if shared is None else shared.down[0].inputs
        self.has_shared_gate = shared_gate is not None
        matrices = [*experts.gate_up, *experts.down]
        self._dtype = next((each.data.dtype for each in matrices if isinstance(each, Panels)), None)
        self._kept: list[Any] = [router, experts, shared]  # the description has addresses of these
        self._description = MixtureDescriptor(
            hidden=self.hidden,
            experts=self.count,
            size=self.size,
            shared_size=self.shared_size,
            router=router.data.data_ptr(),
            router_bias=self._values(router_bias),
            routing=RoutingDescriptor(
                correction=self._values(correction),
                per_token=routing.per_token,
                scoring=routing.scoring,
                renormalised=routing.renormalised,
                groups=routing.groups,
                kept_groups=routing.kept_groups,
                epsilon=routing.epsilon,
                factor=routing.factor,
            ),
            activation=gating.activation,
            alpha=gating.alpha,
            limit=gating.limit,
            gate_up=self._matrices(experts.gate_up, experts.gate_up_bias),
            down=self._matrices(experts.down, experts.down_bias),
            shared_gate_up=self._matrices(() if shared is None else shared.gate_up),
            shared_down=self._matrices(() if shared is None else shared.down),
            shared_gate=self._values(shared_gate),
        )

    def _values(self, tensor: torch.Tensor | None) -> int | None:
        """Address of a tensor's values as float32, which are kept."""
        if tensor is None:
            return None
        self._kept.append(values := tensor.float().contiguous())
        return values.data_ptr()

    def _matrices(
        self, matrices: Sequence[Panels | IntegerPanels], biases: Sequence[torch.Tensor] | None = None
    ) -> ExpertMatricesDescriptor:
        count = len(matrices)
        data = (c_void_p * count)(*(each.data.data_ptr() for each in matrices))
        integers = bias = None
        if any(isinstance(each, IntegerPanels) for each in matrices):
            integers = (IntegersDescriptor * count)(*map(described_integers, matrices))
        if biases is not None:
            bias = (c_void_p * count)(*map(self._values, biases))
        arrays = data, integers, bias
        self._kept.append(arrays)
        return ExpertMatricesDescriptor(*(None if each is None else addressof(each) for each in arrays))

    def step(self, x: torch.Tensor) -> MixtureStep:
        """A step of rows `[rows, hidden]`, of which nothing is computed yet."""
        return MixtureStep(self, x)

    def run(self, step: MixtureStepDescriptor, dtype: torch.dtype) -> None:
        """Compute some parts of a step. dtype: of the rows, as they were given.

        Raises RuntimeError if the matrices were packed for the native library, and it is no longer in use.
        """
        if (found := library()) is None:
            raise RuntimeError("experts were packed for the native library, which is no longer in use; pack them again")
        element = ELEMENT_OF[self._dtype or dtype]
        found.chorus_mix(torch.get_num_threads(), element, addressof(self._description), addressof(step))


class MixtureStep:
    """The rows of a step in a layer's mixture, and what is computed of them, in float32. What is of experts has a row
    for each row and expert that it goes to: expert after expert, an expert's rows in order.
    """

    def __init__(self, mixture: NativeMixture, x: torch.Tensor) -> None:
        """x: `[rows, hidden]`."""
        self._mixture, self._dtype = mixture, x.dtype
        rows, pairs, shared_rows = len(x), len(x) * mixture.per_token, len(x) if mixture.shared_size else 0
        self.x = x.float().contiguous()
        self.logits = torch.empty(rows, mixture.count)
        """Of the router."""
        self.chosen = torch.empty(rows, mixture.per_token, dtype=torch.int64)
        """The experts of each row, the best first."""
        self.weights = torch.empty(rows, mixture.per_token)
        """Likewise, their weights."""
        self._places = torch.empty(pairs, dtype=torch.int32)
        self._counts = torch.empty(mixture.count, dtype=torch.int32)
        self.gate_up = torch.empty(pairs, 2 * mixture.size)
        self.outputs = torch.empty(pairs, mixture.hidden)
        self.shared_gate_up = torch.empty(shared_rows, 2 * mixture.shared_size)
        self.shared_outputs = torch.empty(shared_rows, mixture.hidden)
        self.shared_gates = torch.empty(rows, int(mixture.has_shared_gate))
        """Before the sigmoid."""
        self._y = torch.empty(rows, mixture.hidden)
        self._description = MixtureStepDescriptor(
            rows=rows,
            x=self.x.data_ptr(),
            logits=self.logits.data_ptr(),
            chosen=self.chosen.data_ptr(),
            weights=self.weights.data_ptr(),
            place=self._places.data_ptr(),
            counts=self._counts.data_ptr(),
            gate_up=self.gate_up.data_ptr(),
            outputs=self.outputs.data_ptr(),
            shared_gate_up=self.shared_gate_up.data_ptr(),
            shared_outputs=self.shared_outputs.data_ptr(),
            shared_gates=self.shared_gates.data_ptr(),
            y=self._y.data_ptr(),
        )

    def run(self, first: MixturePart, last: MixturePart | None = None) -> None:
        """Compute a part, or those from `first` up to `last`; earlier ones must be computed."""
        self._description.first, self._description.last = first, (first if last is None else last) + 1
        self._mixture.run(self._description, self._dtype)

    @property
    def y(self) -> torch.Tensor:
        """`[rows, hidden]`, in the dtype of the rows."""
        return self._y.to(self._dtype)

    @property
    def hidden(self) -> torch.Tensor:
        """`activation(gate) · up` of experts."""
        return self.gate_up[:, : self._mixture.size]

    @property
    def shared_hidden(self) -> torch.Tensor:
        """`activation(gate) · up` of the shared expert."""
        return self.shared_gate_up[:, : self._mixture.shared_size]

    def rows_by_expert(self) -> list[tuple[int, list[int]]]:
        """The experts that are used, each with its rows, in rising order."""
        rows = np.empty(len(self._places), np.int64)
        rows[self._places.numpy()] = np.arange(len(rows)) // self._mixture.per_token
        found, begin, in_order = [], 0, rows.tolist()
        for expert, count in enumerate(self._counts.tolist()):
            if count:
                found.append((expert, in_order[begin : begin + count]))
                begin += count
        return found
