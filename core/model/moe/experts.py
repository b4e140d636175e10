"""A mixture of experts in one step: rows are routed, gathered by expert, multiplied, and added up in a fixed order.

A row's result depends on no other row: its products don't (see `ops.moe.expert_gemms`), and its experts are added up
from the best to the worst.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from ....memory.pages.projections import Role
from ....ops.elementwise.activations import gelu, gelu_tanh, sigmoid
from ....ops.elementwise.elementwise import (
    bounded_silu_and_mul,
    clamped_swiglu,
    gelu_and_mul,
    gelu_by_erf_and_mul,
    limited_swiglu,
    relu_squared,
    relu_squared_and_mul,
    scaled_norm,
    silu_and_mul,
)
from ....ops.gemm.narrow_weights import NarrowWeight
from ....ops.library.native_descriptors import NativeGating
from ....ops.library.native_integers import IntegerPanels
from ....ops.moe import expert_gemms
from ....ops.moe.expert_gemms import Matrix, Panels, multiply_each
from ....ops.moe.expert_tiles_schedule import ExpertLaunches
from ....ops.moe.native_mixture import NativeMixture
from ..checkpoints.quantization.group_scaled import GroupScaled
from ..checkpoints.quantization.groups import pack_scaled
from ..native_names import native_gating
from ..specs.feed_forward import (
    Activation,
    BoundedSwiglu,
    ClampedSwiglu,
    ExpertActivation,
    Experts,
    LimitedSwiglu,
    Routing,
    Scoring,
    UngatedActivation,
)
from .mixture_launches import MixtureLaunches
from .mixture_lora import Going, MixtureLora

_T = TypeVar("_T")

APART = ExpertLaunches()
"""The activation is a launch of its own, and rows are sorted."""

_MIXED_ROWS = 256
"""Rows whose weighted outputs are added up at once."""


@dataclass(slots=True, kw_only=True)
class ExpertWeights(ABC):
    """A layer's experts and their router."""

    router: Matrix
    """`[experts, hidden]`, float32; on a GPU, and `shared_gate`, in the model's dtype if that has all its numbers."""

    correction: torch.Tensor | None = None
    """`[experts]`, float32: see `Routing.corrected`."""

    shared_gate_up: Matrix | None = None
    """`[2·shared_size, hidden]`."""

    shared_down: Matrix | None = None
    """`[hidden, shared_size]`."""

    shared_gate: torch.Tensor | None = None
    """`[1, hidden]`, float32: see `Experts.shared_gate`."""

    router_bias: torch.Tensor | None = None
    """`[experts]`, float32: see `Routing.bias`."""

    factors: torch.Tensor | None = None
    """`[experts]`, float32: see `Routing.scaled`."""

    scale: torch.Tensor | None = None
    """`[1]`, float32: of all weights, where there are sinks."""

    out_norm: torch.Tensor | None = None
    """`[latent]`, float32, less one: see `LatentExperts`."""

    @abstractmethod
    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The router's product with rows `[rows, hidden]`, with its bias: `[rows, experts]` float32."""

    @abstractmethod
    def shared_gates(self, x: torch.Tensor) -> torch.Tensor:
        """The product of rows `[rows, hidden]` with `shared_gate`: `[rows, 1]` float32."""

    @abstractmethod
    def choose(self, logits: torch.Tensor, routing: Routing) -> ExpertChoice:
        """Choose experts by a router's logits `[rows, experts]` float32."""

    @abstractmethod
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
        """The experts' outputs for rows `[rows, hidden]`: `[rows · per_token, hidden]`. Only those that a row goes to
        are read.

        chosen: `[rows, per_token]` int64, the experts of each row. lora: the step's adapters; None: no adapters.
        factors: `[rows, per_token]` float32, of the experts' inputs; None: they are as they are. launches: on
        a GPU.
        """

    @abstractmethod
    def add_up(self, outputs: torch.Tensor, weights: torch.Tensor, shared: SharedOutputs | None) -> torch.Tensor:
        """`Σ weights · outputs`, and the shared expert's, in float32, place after place; in the outputs' dtype.

        outputs: `[rows, places, hidden]`. weights: `[rows, places]` float32.
        """

    def native(self, spec: Experts) -> NativeMixture | None:
        """The same for the native library, router and all; None if something isn't packed for it. Experts of latents
        come without the shared one.
        """
        return None

    def native_shared(self, spec: Experts) -> NativeMixture | None:
        """Likewise, the shared expert alone."""
        return None


class SortedPairs(NamedTuple):
    """Pairs of a row and an expert, expert after expert."""

    pairs: torch.Tensor
    """int64, their places in `[rows, per_token]`."""

    ends: list[int]
    """End of each expert's pairs."""

    used: list[int]
    """The experts that have any."""


def sorted_by_expert(chosen: torch.Tensor) -> SortedPairs:
    """Sort pairs by their experts. chosen: `[rows, per_token]` int64, on a CPU."""
    experts = chosen.flatten().numpy()
    places = experts.argsort(kind="stable")
    sorted_experts = experts[places]
    ends = [*(np.flatnonzero(np.diff(sorted_experts)) + 1).tolist(), len(places)]
    return SortedPairs(torch.from_numpy(places), ends, sorted_experts[np.array(ends) - 1].tolist())


def lora_of(lora: MixtureLora | MixtureLaunches | None, kind: type[_T]) -> _T | None:
    """The adapters, which are of this kind: those of a GPU are of experts in stacks, and of no others."""
    if lora is None or isinstance(lora, kind):
        return lora
    raise TypeError(f"what adapters add to these experts must be {kind.__name__}, not {type(lora).__name__}")


def gating_of(activation: ExpertActivation) -> NativeGating | None:
    """What becomes of gate and up in the native library; None: it does not compute that."""
    return None if activation is UngatedActivation.XIELU else native_gating(activation)  # which has parameters


def what_kernels_lack(spec: Experts) -> str | None:
    """Why the native kernels can't compute a mixture; None if they can."""
    if spec.LACKS:
        return spec.LACKS
    shared = spec.shared_activation or spec.activation
    if isinstance(shared, UngatedActivation) == spec.is_gated:
        return f"mixture of experts with {spec.activation}, whose shared expert has {shared}"
    lacking = next((each for each in (spec.activation, shared) if gating_of(each) is None), None)
    return None if lacking is None else f"mixture of experts with {lacking}"


class ExpertKernels(StrEnum):
    """Kernels that multiply experts."""

    NATIVE = "native"
    """The native library, where it is there."""

    TORCH = "torch"
    """oneDNN, or torch where it has none."""

    TILES = "tiles"
    """A kernel that multiplies all experts of a layer in one launch, on a GPU."""


@dataclass(frozen=True)
class ExpertPack:
    """Packs a matrix of an expert, as it is read from a checkpoint, for kernels."""

    dtype: torch.dtype
    pack: expert_gemms.Pack
    """Packs a tensor of `dtype`."""
    pack_integers: Callable[[GroupScaled], Matrix | NarrowWeight] = pack_scaled
    """Packs narrow values with scales."""
    keeps: Callable[[GroupScaled], bool] | None = None
    """Which matrices that are stored as narrow values with scales, or quantised so, are packed as such; None: all are
    dequantised.
    """

    def __call__(self, weight: torch.Tensor | GroupScaled) -> Matrix | NarrowWeight:
        return self.pack_integers(weight) if isinstance(weight, GroupScaled) else self.pack(weight.to(self.dtype))


def unpacked(matrices: list[Matrix]) -> list[Any]:
    """The same list, of tensors that nothing has packed yet."""
    if any(isinstance(each, Panels | IntegerPanels) for each in matrices):
        raise TypeError("a layer's experts are packed already")
    return matrices


class ExpertChoice(NamedTuple):
    """Where tokens go."""

    experts: torch.Tensor
    """`[tokens, per_token]` int64, the best first."""

    weights: torch.Tensor
    """Likewise, float32."""


def choose(logits: torch.Tensor, routing: Routing, correction: torch.Tensor | None = None) -> ExpertChoice:
    """Choose experts by a router's logits `[tokens, experts]` float32. Of equal scores the same come first as of
    `torch.topk`.
    """
    if routing.scoring is Scoring.SPARSE_MIXER:
        return _one_by_one(logits, routing)
    scores = logits
    if routing.scoring is Scoring.SOFTMAX:
        scores = logits.softmax(-1)
    elif routing.scoring is Scoring.SIGMOID:
        scores = sigmoid(logits)
    ranked = scores if correction is None else scores + correction
    if routing.groups > 1:
        ranked = _within_groups(ranked, routing)
    chosen = ranked.topk(routing.per_token, dim=-1).indices
    weights = scores.gather(1, chosen)
    if routing.scoring is Scoring.SOFTMAX_OF_CHOSEN:
        weights = weights.softmax(-1)
    elif routing.scoring is Scoring.SIGMOID_OF_CHOSEN:
        weights = sigmoid(weights)
    if routing.renormalised:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + routing.epsilon if routing.epsilon else total)
    return ExpertChoice(chosen, weights if routing.factor == 1 else weights * routing.factor)


def _one_by_one(logits: torch.Tensor, routing: Routing) -> ExpertChoice:
    """See `Scoring.SPARSE_MIXER`."""
    experts, weights, others = [], [], logits
    for _ in range(routing.per_token):
        best, chosen = others.max(-1, keepdim=True)
        is_far = (best - logits) / logits.abs().maximum(best) > 2 * routing.jitter
        near = others.masked_fill(is_far, float("-inf")).softmax(-1)
        experts.append(chosen)
        weights.append(near.gather(1, chosen))
        others = others.scatter(1, chosen, float("-inf"))
    return ExpertChoice(torch.cat(experts, 1), torch.cat(weights, 1))


def _within_groups(ranked: torch.Tensor, routing: Routing) -> torch.Tensor:
    """The scores, with `masked_score` for experts outside the groups that each token may choose from."""
    groups = ranked.view(len(ranked), routing.groups, -1)
    best = groups.topk(routing.group_best, dim=-1).values.sum(-1).topk(routing.kept_groups, dim=-1).indices
    kept = torch.zeros(groups.shape[:2], dtype=torch.bool, device=ranked.device).scatter_(1, best, True)
    return groups.masked_fill(~kept[..., None], routing.masked_score).view_as(ranked)


def mix_experts(
    x: torch.Tensor,
    weights: ExpertWeights,
    spec: Experts,
    lora: MixtureLora | MixtureLaunches | None = None,
    routed: torch.Tensor | None = None,
    *,
    launches: ExpertLaunches = APART,
) -> torch.Tensor:
    """The output of a layer's mixture of experts for rows `[rows, hidden]`. lora: the step's adapters. routed: the
    router's input, where that is another one than the experts'. launches: on a GPU.
    """
    if routed is None and (native := weights.native(spec)) is not None:
        return native.mix(x, None if (own := lora_of(lora, MixtureLora)) is None else own.native).y
    routed = x if routed is None else routed
    logits = weights.logits(routed)
    if lora is not None:
        lora.add(Role.ROUTER, logits, routed)
    if spec.routing.logits_factor != 1:
        logits = logits * spec.routing.logits_factor
    experts, factors = weights.choose(logits, spec.routing)
    if weights.factors is not None:
        factors = factors * weights.factors[experts]
    of_inputs = factors if spec.routing.of_inputs else None
    is_none = experts >= spec.count if spec.choices > spec.count else None
    experts = experts if is_none is None else experts.masked_fill(is_none, 0)
    outputs = weights.outputs(x, experts, spec, lora, of_inputs, launches=launches)
    if weights.out_norm is not None and spec.latent is not None and spec.latent.eps is not None:
        outputs = scaled_norm(outputs, 1 + weights.out_norm, spec.latent.eps)
    outputs = outputs.view(*experts.shape, -1)
    if is_none is not None:
        outputs = torch.where(is_none[..., None], spec.given(x)[:, None], outputs)
    factors = factors if of_inputs is None else torch.ones_like(factors)
    shared = _of_shared(x, weights, spec, lora) if spec.latent is None else None  # else it reads no latents
    return weights.add_up(outputs, factors, shared)


def shared_expert(
    x: torch.Tensor, weights: ExpertWeights, spec: Experts, lora: MixtureLora | MixtureLaunches | None = None
) -> torch.Tensor:
    """The output of the shared expert alone, for rows `[rows, hidden]`, where the others read latents."""
    shared = _of_shared(x, weights, spec, lora)
    assert shared is not None, "there is a shared expert"
    assert shared.gates is None, "it has no gates beside experts of latents"
    return shared.outputs


class SharedOutputs(NamedTuple):
    """Of the shared expert, for each row."""

    outputs: torch.Tensor
    """`[rows, hidden]`."""

    gates: torch.Tensor | None
    """`[rows, 1]` float32: the sigmoid of these is multiplied with the outputs; None: there are none."""


def _of_shared(
    x: torch.Tensor, weights: ExpertWeights, spec: Experts, lora: MixtureLora | MixtureLaunches | None
) -> SharedOutputs | None:
    if weights.shared_gate_up is None or weights.shared_down is None:
        return None
    added = None if lora is None else AddedToExperts(lora, Role.SHARED_GATE_UP, Role.SHARED_DOWN)
    parts = ExpertParts([len(x)], [weights.shared_gate_up], [weights.shared_down])
    outputs, gates = through(x, parts, spec.shared_activation or spec.activation, added), None
    if weights.shared_gate is not None:
        gates = weights.shared_gates(x)
        if lora is not None:
            lora.add(Role.SHARED_GATE, gates, x)
    return SharedOutputs(outputs, gates)


def weighted_sum(outputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """`Σ weights · outputs` in float32, added up place after place. outputs: `[rows, places, hidden]`. weights: `[rows,
    places]`. Some rows at once, as their products take memory.
    """
    if len(outputs) > _MIXED_ROWS:
        parts = zip(outputs.split(_MIXED_ROWS), weights.split(_MIXED_ROWS), strict=True)
        return torch.cat([weighted_sum(*part) for part in parts])
    mixed, *others = (outputs.float() * weights[..., None]).unbind(1)
    for product in others:
        mixed = mixed + product
    return mixed


class ExpertParts(NamedTuple):
    """Experts that rows go through, each some of them."""

    ends: Sequence[int]
    """End of each expert's rows."""
    gate_up: Sequence[Matrix]
    down: Sequence[Matrix]
    gate_up_bias: Sequence[torch.Tensor] | None = None
    down_bias: Sequence[torch.Tensor] | None = None


class AddedToExperts(NamedTuple):
    """Adds adapters to the two products of experts."""

    lora: MixtureLora | MixtureLaunches
    gate_up: Role
    down: Role
    experts: Going | None = None
    """None: the shared one, which all of the step's tokens go to."""

    def add(self, role: Role, y: torch.Tensor, x: torch.Tensor) -> None:
        if self.experts is None or isinstance(self.lora, MixtureLaunches):
            self.lora.add(role, y, x)
        else:
            self.lora.add_of_experts(role, y, x, self.experts)


def through(
    x: torch.Tensor,
    parts: ExpertParts,
    activation: ExpertActivation,
    added: AddedToExperts | None = None,
    factors: torch.Tensor | None = None,
) -> torch.Tensor:
    """factors: `[rows]`, of x; see `Routing.of_inputs`."""
    y = multiply_each(x, parts.ends, parts.gate_up, parts.gate_up_bias)
    if added is not None:
        added.add(added.gate_up, y, x)
    if factors is not None:
        y.mul_(factors[:, None])
    hidden = activated(y, activation)
    y = multiply_each(hidden, parts.ends, parts.down, parts.down_bias)
    if added is not None:
        added.add(added.down, y, hidden)
    return y


def activated(gate_up: torch.Tensor, activation: ExpertActivation) -> torch.Tensor:
    if isinstance(activation, UngatedActivation):
        return activated_alone(gate_up, activation)
    if isinstance(activation, ClampedSwiglu):
        return clamped_swiglu(gate_up, activation.alpha, activation.limit)
    if isinstance(activation, LimitedSwiglu):
        return limited_swiglu(gate_up, activation.limit)
    if isinstance(activation, BoundedSwiglu):
        return bounded_silu_and_mul(gate_up, activation.limit)
    return _GATED[activation](gate_up)


def activated_alone(up: torch.Tensor, activation: UngatedActivation) -> torch.Tensor:
    """Without a gate, and without parameters of its own. up: `[rows, ffn]`."""
    return _ALONE[activation](up)


_GATED: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    Activation.SILU: silu_and_mul,
    Activation.GELU_TANH: gelu_and_mul,
    Activation.RELU_SQUARED: relu_squared_and_mul,
    Activation.GELU: gelu_by_erf_and_mul,
}

_ALONE: dict[UngatedActivation, Callable[[torch.Tensor], torch.Tensor]] = {
    UngatedActivation.GELU: gelu,
    UngatedActivation.GELU_TANH: gelu_tanh,
    UngatedActivation.RELU: torch.relu,
    UngatedActivation.RELU_SQUARED: relu_squared,
}
