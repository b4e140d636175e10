"""Specifications of a model's layers: values alone, read from a checkpoint by its family and obeyed by every decoder.

A layer is a mixer of tokens (attention or Gated DeltaNet) and a feed-forward part (gated or not, or a mixture of
experts), each with norms around it, added to the residual stream x. With `Norms.BEFORE`:

    x += residual_multiplier · mixer(norm(x))
    x += residual_multiplier · feed_forward(norm(x))

Tests: tests/core/model/test_model_config.py, tests/core/test_families.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from ...memory.pages.projections import (
    Projection,
    attention_projections,
    gated_projections,
    linear_projections,
    mixture_projections,
)
from .rope_config import RopeConfig

if TYPE_CHECKING:
    import torch


class Activation(StrEnum):
    """Activation of a gated feed-forward part, by transformers' names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


@dataclass(frozen=True, slots=True)
class ClampedSwiglu:
    """`(up + 1) · gate · sigmoid(alpha · gate)`, with gate at most `limit` and up within ± `limit` (gpt-oss)."""

    alpha: float
    limit: float


class UngatedActivation(StrEnum):
    """Activation of a feed-forward part without a gate, by transformers' names."""

    GELU_TANH = "gelu_pytorch_tanh"

    RELU_SQUARED = "relu2"
    """`max(x, 0)²`: Nemotron, Arcee."""

    XIELU = "xielu"
    """See `ops.elementwise.xielu`; each layer has learned parameters (Apertus)."""


class Norms(StrEnum):
    """Where the norms of a layer stand."""

    BEFORE = "before"
    """`x += f(norm(x))`: Llama."""

    AFTER = "after"
    """`x += norm(f(x))`: OLMo 2, EXAONE 4."""

    AROUND = "around"
    """`x += norm_out(f(norm(x)))`: Gemma, GLM-4."""

    PARALLEL = "parallel"
    """`n = norm(x); x += mixer(n) + feed_forward(n)`: Cohere."""


class HeadNorm(StrEnum):
    """Norm of queries and keys, before they are rotated unless it says otherwise."""

    EACH = "each"
    """Every head by itself, with weights `[head_dim]`: Qwen3, Gemma 3."""

    ALL = "all"
    """All heads of a token at once, with weights `[heads · head_dim]`: OLMo 2."""

    OWN = "own"
    """LayerNorm of every head by itself, each with weights of its own, `[heads · head_dim]`: Command R+."""

    ROTATED = "rotated"
    """Every head by itself after it was rotated, with weights `[head_dim]`: Hunyuan. Rotating changes no norm, so heads
    are divided by their norms before, and the queries alone are multiplied by both weights after.
    """


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm over the last dimension, with statistics in float32."""

    eps: float

    centered: bool = False
    """LayerNorm without bias, which subtracts the mean (Cohere), rather than RMSNorm."""

    one_plus: bool = False
    """The checkpoint stores weight - 1 (Gemma)."""

    wide: bool = False
    """Multiply by the weight in float32 and round then (Gemma, OLMo 2), rather than round before (Llama)."""

    biased: bool = False
    """A bias is added: LayerNorm as PyTorch has it (StarCoder 2). `centered` and `wide` are true, too."""

    weightless: bool = False
    """The checkpoint has no weight, which is 1 (OLMo)."""


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with their position p, by `1 + beta · log(1 + floor(p / positions))` (Llama 4, Ministral 3)."""

    beta: float
    positions: int

    def factors(self, count: int) -> torch.Tensor:
        """Of positions 0 … count-1, float32."""
        import torch

        return 1 + self.beta * torch.log(1 + torch.floor(torch.arange(count) / self.positions))


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Causal grouped-query attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int

    scale: float
    """Factor of the scores q · k, usually head_dim^-0.5."""

    rope: RopeConfig | None
    """None: queries and keys are not rotated (NoPE)."""

    window: int | None = None
    """Tokens that a query sees, itself included; None: all before it."""

    softcap: float | None = None
    """Scores s become `softcap · tanh(s / softcap)`."""

    head_norm: HeadNorm | None = None
    qkv_bias: bool = False
    o_bias: bool = False

    output_gate: bool = False
    """q_proj gives each head a query and then a gate: `o_proj(attended · sigmoid(gate))` (Qwen3.5)."""

    query_growth: QueryGrowth | None = None

    sinks: bool = False
    """Each head has a learned score that joins the softmax's denominator (gpt-oss)."""

    kv_copies: int = 1
    """TP ranks that have the same K/V heads, because there are more ranks than heads."""

    def window_within(self, max_model_len: int) -> int | None:
        """The window, unless no request of so many tokens can leave it."""
        return None if self.window is None or self.window >= max_model_len else self.window

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def q_rows(self) -> int:
        """Rows of q_proj: queries, and the gates where there are any."""
        return self.q_size * (1 + self.output_gate)

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """Its matrices. hidden: width of the residual stream."""
        return attention_projections(hidden, self.num_heads, self.num_kv_heads, self.head_dim, gate=self.output_gate)

    def share(self, size: int) -> AttentionSpec:
        """One of `size` ranks' share."""
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=max(1, self.num_kv_heads // size),
            kv_copies=max(1, size // self.num_kv_heads),
        )


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Gated DeltaNet (arXiv 2412.06464): linear attention with a state of fixed size; see `ops.gated_delta`."""

    num_k_heads: int
    """Heads of queries and keys; each serves `num_v_heads / num_k_heads` neighbouring heads of values."""

    num_v_heads: int
    k_dim: int
    """Width of a head of queries or keys."""

    v_dim: int
    """Width of a head of values."""

    eps: float
    """Of the gated norm of each head's output."""

    conv_size: int = 4
    """Tokens that the causal convolution sees, a token itself included."""

    @property
    def k_size(self) -> int:
        return self.num_k_heads * self.k_dim

    @property
    def v_size(self) -> int:
        return self.num_v_heads * self.v_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.k_size + self.v_size

    @property
    def in_size(self) -> int:
        """Width of the input product: queries, keys and values, then z, b and a."""
        return self.channels + self.v_size + 2 * self.num_v_heads

    @property
    def draft_size(self) -> int:
        """Width of the inputs that make a draft's state: queries, keys and values, then b and a."""
        return self.channels + 2 * self.num_v_heads

    @property
    def conv_shape(self) -> tuple[int, int]:
        """The convolution's state of a sequence in a layer, float32: its inputs of the last tokens, oldest first."""
        return self.conv_size - 1, self.channels

    @property
    def recurrent_shape(self) -> tuple[int, int, int]:
        """The delta rule's state of a sequence in a layer, float32."""
        return self.num_v_heads, self.k_dim, self.v_dim

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """See `AttentionSpec.projections`."""
        return linear_projections(hidden, self.k_size, self.v_size, self.num_k_heads, self.num_v_heads)

    def share(self, size: int) -> GatedDeltaSpec:
        """One of `size` ranks' share."""
        return replace(self, num_k_heads=self.num_k_heads // size, num_v_heads=self.num_v_heads // size)


@dataclass(frozen=True, slots=True)
class GatedSpec:
    """`down(activation(gate(x)) · up(x))`."""

    size: int
    """Width of gate and up."""

    activation: Activation = Activation.SILU
    bias: bool = False

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """See `AttentionSpec.projections`."""
        return gated_projections(hidden, self.size)

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

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """See `AttentionSpec.projections`."""
        return gated_projections(hidden, self.size)[1:]

    def share(self, size: int) -> UngatedSpec:
        """One of `size` ranks' share."""
        return replace(self, size=self.size // size)


class Scoring(StrEnum):
    """How a router's logits become the scores of experts, float32."""

    SOFTMAX = "softmax"
    """Over all experts: Mixtral, Qwen3."""

    SOFTMAX_OF_CHOSEN = "softmax of the chosen"
    """Experts are chosen by their logits, and the softmax is over the chosen ones alone: Granite."""

    SIGMOID = "sigmoid"
    """Of each by itself: GLM-4."""


@dataclass(frozen=True, slots=True)
class Routing:
    """Which experts a token goes to, and their weights in the sum."""

    per_token: int
    """Experts of a token: those of the highest scores."""

    scoring: Scoring = Scoring.SOFTMAX

    renormalised: bool = False
    """The chosen experts' weights are divided by their sum."""

    epsilon: float = 0.0
    """Added to that sum."""

    factor: float = 1.0
    """Of the weights."""

    corrected: bool = False
    """A learned bias is added to the scores that choose, not to the weights."""

    groups: int = 1
    """Equal groups of neighbouring experts."""

    kept_groups: int = 1
    """Groups that a token may choose from: those with the highest sums of their two best scores."""

    bias: bool = False
    """The router's logits have a bias."""


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts, each a gated part: `Σ weight · down(activation(gate(x)) · up(x))` of the experts that a
    router chooses for a token, and of the shared one where there is one. `ClampedSwiglu` has a form of its own.
    """

    count: int

    size: int
    """Width of an expert's gate and up."""

    routing: Routing
    activation: Activation | ClampedSwiglu = Activation.SILU

    shared_size: int = 0
    """Width of the gate and up of an expert that every token goes to; 0: there is none."""

    shared_gate: bool = False
    """The shared expert's output is multiplied by the sigmoid of a product of x (Qwen3.5)."""

    biased: bool = False
    """Each expert's gate, up and down have biases (gpt-oss)."""

    bias = False

    @property
    def active_size(self) -> int:
        """Width of all that a token goes through."""
        return self.routing.per_token * self.size + self.shared_size

    @property
    def share_per_token(self) -> float:
        """Share of the experts that a token goes to."""
        return self.routing.per_token / self.count

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """See `AttentionSpec.projections`; those of experts are of each one."""
        return mixture_projections(hidden, self.count, self.size, self.shared_size, shared_gate=self.shared_gate)

    def share(self, size: int) -> Experts:
        """One of `size` ranks' share: of all experts some columns."""
        return replace(self, size=self.size // size, shared_size=self.shared_size // size)


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer."""

    mixer: AttentionSpec | GatedDeltaSpec
    feed_forward: GatedSpec | UngatedSpec | Experts
    norms: Norms = Norms.BEFORE

    residual_multiplier: float = 1.0
    """Factor of each part's addition to the residual stream (Granite)."""

    @property
    def attention(self) -> AttentionSpec | None:
        """The mixer, if it is attention."""
        return self.mixer if isinstance(self.mixer, AttentionSpec) else None

    @property
    def rope(self) -> RopeConfig | None:
        """The rope of its attention, if it has either."""
        return self.mixer.rope if isinstance(self.mixer, AttentionSpec) else None

    @property
    def delta(self) -> GatedDeltaSpec | None:
        """The mixer, if it is Gated DeltaNet."""
        return self.mixer if isinstance(self.mixer, GatedDeltaSpec) else None

    @property
    def experts(self) -> Experts | None:
        """The feed-forward part, if it is a mixture of experts."""
        return self.feed_forward if isinstance(self.feed_forward, Experts) else None

    @property
    def biased(self) -> frozenset[str]:
        """Paths of the projections with a bias."""
        found = ["mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"] if self.feed_forward.bias else []
        found = found[1:] if isinstance(self.feed_forward, UngatedSpec) else found
        if (mixer := self.attention) is not None:
            found += ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"] if mixer.qkv_bias else []
            found += ["self_attn.o_proj"] if mixer.o_bias else []
        return frozenset(found)

    def projections(self, hidden: int) -> tuple[Projection, ...]:
        """The matrices of the layer, by their paths in Llama's checkpoints, or Qwen3.5's."""
        return self.mixer.projections(hidden) + self.feed_forward.projections(hidden)

    def share(self, size: int) -> LayerSpec:
        """One of `size` ranks' share."""
        return replace(self, mixer=self.mixer.share(size), feed_forward=self.feed_forward.share(size))
