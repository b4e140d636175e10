"""Specifications of feed-forward parts: gated or not, or a mixture of experts.

Tests: tests/core/model/specs/test_model_config.py, tests/core/paths
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, ClassVar, Self

from ....memory.pages.projections import Projection, Role
from ....ops.moe.routing import Routing as Routing
from ....ops.moe.routing import Scoring as Scoring

if TYPE_CHECKING:
    from torch import Tensor


class Activation(StrEnum):
    """Activation of a gated feed-forward part, by transformers' names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"

    RELU_SQUARED = "relu2"
    """`max(x, 0)²`: BitNet."""

    GELU = "gelu"
    """By the normal distribution, not by tanh: Zamba 2."""


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`(up + 1) · gate · sigmoid(alpha · gate)`, with gate at most `limit` and up within ± `limit` (gpt-oss)."""

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class LimitedSwiglu:
    """`silu(gate) · up`, with gate at most `limit` and up within ± `limit` (HY V4, GLM-5.3-Flash)."""

    limit: float

    def __str__(self) -> str:
        return f"silu of at most {self.limit:g}"


@dataclass(frozen=True, slots=True)
class BoundedSwiglu:
    """`silu(gate) · up`, with silu(gate) at most `limit` and up within ± `limit` (Step 3.7)."""

    limit: float

    def __str__(self) -> str:
        return f"silu within ±{self.limit:g}"


class UngatedActivation(StrEnum):
    """Activation of a feed-forward part without a gate, by transformers' names."""

    GELU_TANH = "gelu_pytorch_tanh"

    GELU = "gelu"
    """With the error function: GPT-NeoX."""

    RELU = "relu"
    """OPT."""

    RELU_SQUARED = "relu2"
    """`max(x, 0)²`: Nemotron, Arcee."""

    XIELU = "xielu"
    """See `ops.elementwise.elementwise.xielu`; each layer has learned parameters (Apertus)."""


#: Activations of a gate, by which up is multiplied.
GatedActivation = Activation | BoundedSwiglu | ClampedSwiglu | LimitedSwiglu

#: Activations of experts.
ExpertActivation = GatedActivation | UngatedActivation


@dataclass(frozen=True, slots=True)
class GatedSpec:
    """`down(activation(gate(x)) · up(x))`."""

    size: int
    """Width of gate and up."""

    activation: GatedActivation = Activation.SILU
    bias: bool = False

    form: str = ""
    """See `AttentionSpec.form`."""

    def share(self, size: int) -> GatedSpec:
        """One of `size` ranks' share."""
        return replace(self, size=self.size // size)


@dataclass(frozen=True, slots=True)
class UngatedSpec:
    """`down(activation(up(x)))`."""

    size: int
    """Width of up."""

    activation: UngatedActivation
    bias: bool = False

    form = ""

    def share(self, size: int) -> UngatedSpec:
        """One of `size` ranks' share."""
        return replace(self, size=self.size // size)


@dataclass(frozen=True, slots=True)
class LatentExperts:
    """Experts read latents of a layer's input x, which the router reads, and add up to a latent (Nemotron 3 Super).

    `up(Σ weight · expert(down(x))) + shared(x)`, with norms `up(Σ weight · bare(w · expert(norm(down(x)))))`, where the
    bare norm has no weights (Muse Spark).
    """

    size: int
    """Width of latents."""

    eps: float | None = None
    """Of the norms of latents and of each expert's output; None: there are none."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, each a gated part: `Σ weight · down(activation(gate(x)) · up(x))` of the experts that a
    router chooses for a token, and of the shared one where there is one. `ClampedSwiglu` has a form of its own; with an
    `UngatedActivation` each is `down(activation(up(x)))`.

    A family whose mixtures have more derives from it, in its folder.
    """

    LACKS: ClassVar[str] = ""
    """What mixtures of this class have that the native kernels do not compute; empty: they compute them."""

    count: int

    size: int
    """Width of an expert's gate and up."""

    routing: Routing
    activation: ExpertActivation = Activation.SILU

    shared_size: int = 0
    """Width of the gate and up of an expert that every token goes to; 0: there is none."""

    shared_activation: ExpertActivation | None = None
    """The shared expert's; None: that of the others (Step 3.7 has bounds of its own there)."""

    shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a product of x (Qwen3.5)."""

    latent: LatentExperts | None = None
    """None: experts read the layer's input. A mixture over latents has no shared expert."""

    biased: bool = False
    """Each expert's gate, up and down have biases (gpt-oss)."""

    has_fixed_router: bool = False
    """Adapters don't change the router, whatever tensors they have of it (LongCat-Flash)."""

    bias = False

    @property
    def unbounded(self) -> Experts:
        """The same without bounds of activations, in which layers of a model may differ."""
        both = (self.activation, self.shared_activation)
        own, shared = (Activation.SILU if isinstance(each, BoundedSwiglu) else each for each in both)
        return replace(self, activation=own, shared_activation=None if shared == own else shared)

    @property
    def is_gated(self) -> bool:
        """True if experts have gates."""
        return not isinstance(self.activation, UngatedActivation)

    @property
    def active_size(self) -> int:
        """Width of all that a token goes through."""
        return self.routing.per_token * self.size + self.shared_size

    @property
    def for_all(self) -> str:
        """Experts that every token goes to, behind what is said of the others; for people."""
        return f", and one of {self.shared_size} for all" if self.shared_size else ""

    @property
    def share_per_token(self) -> float:
        """Share of the experts that a token goes to."""
        return self.routing.per_token / self.choices

    @property
    def choices(self) -> int:
        """What a router chooses among: experts, and behind them what is none. See `given`."""
        return self.count

    def given(self, x: Tensor) -> Tensor:
        """What a choice that is no expert gives of x: x itself, without a product."""
        return x

    @property
    def num_stored(self) -> int:
        """Gates and ups that a checkpoint has; those of choices that are no experts are not read."""
        return self.count

    def router_inputs(self, hidden: int) -> int:
        """Width of what the router takes."""
        return hidden

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """Its matrices; those of experts are of each one. hidden: width of the residual stream."""
        inputs, width = ("gate_proj", "up_proj") if self.is_gated else ("up_proj",), hidden
        if self.latent is not None:
            width = self.latent.size
        found: list[Projection] = []
        if not self.has_fixed_router:
            found.append(Projection("mlp.gate", Role.ROUTER, self.router_inputs(hidden), self.choices, 1))
        if size := self.shared_size:
            at = "mlp.shared_expert"
            found += [Projection(f"{at}.{each}", Role.SHARED_GATE_UP, hidden, size, size) for each in inputs]
            found.append(Projection(f"{at}.down_proj", Role.SHARED_DOWN, size, hidden, size, is_row_parallel=True))
        if self.shared_gate:
            found.append(Projection("mlp.shared_expert_gate", Role.SHARED_GATE, hidden, 1, 1))
        at, size, count = "mlp.experts", self.size, self.num_stored
        found += [Projection(f"{at}.{each}", Role.EXPERT_GATE_UP, width, size, size, experts=count) for each in inputs]
        down = Projection(
            f"{at}.down_proj", Role.EXPERT_DOWN, size, width, size, experts=self.count, is_row_parallel=True
        )
        return (*found, down)

    @property
    def widths(self) -> dict[str, int]:
        """Widths that ranks share in equal parts, by what has each."""
        return {"experts": self.size, "the shared expert": self.shared_size}

    @property
    def why_whole(self) -> str | None:
        """Why ranks can't share it; None if they can."""
        if self.latent is not None and self.latent.eps is not None:
            return "each expert's output is normalised, of which all ranks together have the sum"
        return None

    def share(self, size: int) -> Self:
        """One of `size` ranks' share: of all experts some columns."""
        return replace(self, size=self.size // size, shared_size=self.shared_size // size)
