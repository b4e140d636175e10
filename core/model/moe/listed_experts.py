"""A layer's experts one by one, for a CPU.

Tests: tests/core/model/moe/test_experts.py, tests/ops/moe/test_native_mixture.py
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch

from ....memory.pages.projections import Role
from ....ops.elementwise.activations import sigmoid
from ....ops.gemm import packed_gemm
from ....ops.library.native_integers import IntegerPanels
from ....ops.moe import expert_gemms
from ....ops.moe.expert_gemms import Matrix, Panels, multiply_each
from ....ops.moe.expert_tiles_schedule import ExpertLaunches
from ....ops.moe.native_mixture import NativeExperts, NativeMixture
from ..specs.feed_forward import Experts, Routing
from .experts import (
    APART,
    AddedToExperts,
    ExpertChoice,
    ExpertParts,
    ExpertWeights,
    SharedOutputs,
    choose,
    gating_of,
    lora_of,
    sorted_by_expert,
    through,
    unpacked,
    weighted_sum,
    what_kernels_lack,
)
from .listed import ListedWeights
from .mixture_launches import MixtureLaunches
from .mixture_lora import MixtureLora
from .stacked_experts import StackedExperts, dense_of, stacked

_T = TypeVar("_T")


@dataclass(slots=True, kw_only=True)
class ListedExperts(ExpertWeights, ListedWeights):
    """A layer's experts one by one, for a CPU."""

    gate_up: list[Matrix]
    """Of each expert `[2·size, hidden]`."""

    down: list[Matrix]
    """Of each expert `[hidden, size]`."""

    gate_up_bias: Sequence[torch.Tensor] | None = None
    """Of each expert `[2·size]`: see `Experts.biased`."""

    down_bias: Sequence[torch.Tensor] | None = None
    """Of each expert `[hidden]`."""

    _native: tuple[Experts, NativeMixture] | None = field(default=None, init=False, repr=False, compare=False)

    def native_shared(self, spec: Experts) -> NativeMixture | None:
        """See `ExpertWeights.native_shared`."""
        gating = gating_of(spec.shared_activation or spec.activation)
        packed = _packed_natively([self.shared_gate_up]), _packed_natively([self.shared_down])
        if gating is None or not all(packed):
            return None
        return NativeMixture(None, NativeExperts([], []), Routing(0), gating, shared=NativeExperts(*packed))

    def native(self, spec: Experts) -> NativeMixture | None:
        """Made once."""
        if self._native is None or self._native[0] is not spec:
            made = _native_mixture(self, spec)
            self._native = None if made is None else (spec, made)
        return None if self._native is None else self._native[1]

    def packed(self, dtype: torch.dtype) -> ListedExperts:
        """See `ListedWeights`: the router is packed as the matrices are. The router and its correction stay float32."""
        biases = ("gate_up_bias", "down_bias")
        is_native = bool(_packed_natively(self.gate_up))
        return replace(
            self,
            router=(expert_gemms.pack if is_native else packed_gemm.pack)(*unpacked([self.router])),
            **{
                name: [each.to(dtype).float() if is_native else each.to(dtype) for each in found]
                for name in biases
                if (found := getattr(self, name))
            },
        )

    def stacked(self, dtype: torch.dtype, device: torch.device) -> StackedExperts:
        """See `ListedWeights`: matrices that are all narrow stay so; the shared expert is dequantised. The
        router stays float32 unless `dtype` has all of its numbers.
        """

        def moved(part: Any, dtype: torch.dtype = torch.float32) -> Any:
            return None if part is None else dense_of(part).to(device, dtype)

        router = dense_of(unpacked([self.router])[0])
        return StackedExperts(
            router=_narrowed(router, dtype).to(device).contiguous(),
            gate_up=stacked(unpacked(self.gate_up), self.gate_up_bias, dtype, device),
            down=stacked(unpacked(self.down), self.down_bias, dtype, device),
            correction=moved(self.correction),
            shared_gate_up=moved(self.shared_gate_up, dtype),
            shared_down=moved(self.shared_down, dtype),
            shared_gate=None if self.shared_gate is None else _narrowed(self.shared_gate, dtype).to(device),
            router_bias=moved(self.router_bias),
            factors=moved(self.factors),
            scale=moved(self.scale),
            out_norm=moved(self.out_norm),
        )

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        bias = None if self.router_bias is None else [self.router_bias]
        return multiply_each(x.float(), [len(x)], [self.router], bias)

    def shared_gates(self, x: torch.Tensor) -> torch.Tensor:
        assert self.shared_gate is not None, "the shared expert has gates"
        return (x.float() * self.shared_gate).sum(-1, keepdim=True)

    def choose(self, logits: torch.Tensor, routing: Routing) -> ExpertChoice:
        return choose(logits, routing, self.correction)

    def add_up(self, outputs: torch.Tensor, weights: torch.Tensor, shared: SharedOutputs | None) -> torch.Tensor:
        mixed = weighted_sum(outputs, weights)
        if shared is not None:
            added = shared.outputs.float()
            if shared.gates is not None:
                added = added * sigmoid(shared.gates)
            mixed += added
        return mixed.to(outputs.dtype)

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
        by_expert, ends, used = sorted_by_expert(chosen)
        tokens = by_expert // chosen.shape[1]

        def of_used(each: Sequence[_T] | None) -> list[_T] | None:
            return None if each is None else [each[expert] for expert in used]

        parts = ExpertParts(
            ends,
            [self.gate_up[expert] for expert in used],
            [self.down[expert] for expert in used],
            of_used(self.gate_up_bias),
            of_used(self.down_bias),
        )
        added = None
        if (lora := lora_of(lora, MixtureLora)) is not None:
            going = [tokens[begin:end].tolist() for begin, end in pairwise((0, *ends))]
            added = AddedToExperts(lora, Role.EXPERT_GATE_UP, Role.EXPERT_DOWN, list(zip(used, going, strict=True)))
        own = None if factors is None else factors.flatten()[by_expert]
        outputs = through(x.index_select(0, tokens), parts, spec.activation, added, own)
        return torch.empty_like(outputs).index_copy_(0, by_expert, outputs)


def _native_mixture(experts: ListedExperts, spec: Experts) -> NativeMixture | None:
    routing, gating, router = spec.routing, gating_of(spec.activation), experts.router
    if gating is None or what_kernels_lack(spec) is not None:
        return None
    shared = _packed_natively([experts.shared_gate_up]), _packed_natively([experts.shared_down])
    gate_up, down = _packed_natively(experts.gate_up), _packed_natively(experts.down)
    has_shared = bool(spec.shared_size) and spec.latent is None
    if not isinstance(router, Panels) or not gate_up or not down or (has_shared and not all(shared)):
        return None
    eps = None if spec.latent is None else spec.latent.eps
    out_norm = None if eps is None or experts.out_norm is None else (1 + experts.out_norm, eps)
    return NativeMixture(
        router,
        NativeExperts(gate_up, down, experts.gate_up_bias, experts.down_bias),
        routing,
        gating,
        router_bias=experts.router_bias,
        correction=experts.correction,
        factors=experts.factors,
        shared=NativeExperts(*shared) if has_shared else None,
        shared_gate=experts.shared_gate,
        shared_gating=None if spec.shared_activation is None else gating_of(spec.shared_activation),
        out_norm=out_norm,
    )


def _packed_natively(matrices: Sequence[Matrix | None]) -> list[Panels | IntegerPanels]:
    """The same matrices, if the native library's panels have all of them; else none."""
    found = [each for each in matrices if isinstance(each, Panels | IntegerPanels)]
    return found if len(found) == len(matrices) else []


def _narrowed(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A float32 weight in the model's dtype, if that has its numbers; products with it are the same, and cheaper."""
    narrow = weight.to(dtype)
    return narrow if torch.equal(narrow.float(), weight) else weight
