"""Norms of the residual stream: their kind, and where a layer has them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Norms(StrEnum):
    """Where the norms of a layer stand."""

    BEFORE = "before"
    """`x += f(norm(x))`: Llama."""

    AFTER = "after"
    """`x += norm(f(x))`: OLMo 2, EXAONE 4."""

    AROUND = "around"
    """`x += norm_out(f(norm(x)))`: Gemma, GLM-4."""

    AFTER_MLP = "before, and after the feed-forward part"
    """`x += mixer(norm(x)); x += norm_out(feed_forward(norm_2(x)))`: A.X K1's layers with experts."""

    PARALLEL = "parallel"
    """`n = norm(x); x += mixer(n) + feed_forward(n)`: Cohere."""

    PARALLEL_TWO_NORMS = "parallel, two norms"
    """`x += mixer(norm(x)) + feed_forward(norm_2(x))`: GPT-NeoX."""

    BEHIND = "behind the additions"
    """`x = norm(x + mixer(x)); x = norm_2(x + feed_forward(x))`: OpenAI GPT."""

    NONE = "none"
    """`x += f(x)`: what takes of several streams has the norms (Qwen4-Exp)."""

    BEHIND_MIXER = "behind the mixer's addition"
    """`x = norm(x + mixer(x)); x += feed_forward(x)`: OpenAI GPT's last layer, whose other norm is the model's."""


#: Those whose norms stand behind the additions.
BEHIND = frozenset((Norms.BEHIND, Norms.BEHIND_MIXER))

#: Those with which the feed-forward part does not read the mixer's output.
PARALLEL = frozenset((Norms.PARALLEL, Norms.PARALLEL_TWO_NORMS))


class NormKind(StrEnum):
    """The formula of a norm. The native library has an enumeration of the same name and members."""

    RMS = "RMSNorm"

    LAYER = "LayerNorm"
    """The mean is subtracted, and no bias is added (Cohere)."""

    BIASED_LAYER = "LayerNorm with a bias"
    """As PyTorch has it (StarCoder 2). `NormSpec.wide` is true, too."""


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A norm over the last dimension, with statistics in float32."""

    eps: float

    kind: NormKind = NormKind.RMS

    one_plus: bool = False
    """The checkpoint stores weight - 1 (Gemma)."""

    wide: bool = False
    """Multiply by the weight in float32 and round then (Gemma, OLMo 2), rather than round before (Llama)."""

    weightless: bool = False
    """The checkpoint has no weight, which is 1 (OLMo)."""

    @property
    def biased(self) -> bool:
        """True if the norm has a bias as well as a weight."""
        return self.kind is NormKind.BIASED_LAYER
