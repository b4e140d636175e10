"""What a model's layers are made of: values alone, read from a checkpoint by its family and obeyed by every decoder.

A layer is a mixer of tokens (attention) and a feed-forward part, each with norms around it, added to the residual
stream x. With `Norms.BEFORE`:

    x += residual_multiplier · mixer(norm(x))
    x += residual_multiplier · feed_forward(norm(x))
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from .rope_config import RopeConfig


class Activation(StrEnum):
    """Activation of a gated feed-forward part, by transformers' names."""

    SILU = "silu"
    GELU_TANH = "gelu_pytorch_tanh"


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
    """Norm of queries and keys before they are rotated."""

    EACH = "each"
    """Every head by itself, with weights `[head_dim]`: Qwen3, Gemma 3."""

    ALL = "all"
    """All heads of a token at once, with weights `[heads · head_dim]`: OLMo 2."""


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

    def window_within(self, max_model_len: int) -> int | None:
        """The window, unless no request of so many tokens can leave it."""
        return None if self.window is None or self.window >= max_model_len else self.window

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class GatedSpec:
    """`down(activation(gate(x)) · up(x))`."""

    size: int
    """Width of gate and up."""

    activation: Activation = Activation.SILU
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer."""

    mixer: AttentionSpec
    feed_forward: GatedSpec
    norms: Norms = Norms.BEFORE

    residual_multiplier: float = 1.0
    """Factor of what each part adds to the residual stream (Granite)."""
