"""Ops of learned factors and gates: of the residual stream, of norms, of embeddings, and of a router that goes over
layers (Muse Spark, ZAYA).

Tests: tests/core/layers/test_gated_residual.py, tests/core/layers/test_convolved_heads.py
"""

from __future__ import annotations

from dataclasses import dataclass

from .ops import ROUTED, STREAM, Op


@dataclass(frozen=True, slots=True)
class NormHeads(Op):
    """The norm of each head's elements, without weights. x: `[tokens, heads · width]`."""

    READS = ("x",)
    WRITES = ("out",)

    x: str
    out: str
    width: int
    eps: float


@dataclass(frozen=True, slots=True)
class NormScaled(Op):
    """The norm of `weight · x`, without weights of its own."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("weight",)

    x: str
    out: str
    weight: str
    eps: float


@dataclass(frozen=True, slots=True)
class AddGated(Op):
    """`x = alpha · x + beta · y`, in place, with factors of each element that are made of a learned number w.

    `beta = sigmoid(w / temperature)`, and `alpha = sqrt(max(1 - beta², 0.001))`.
    """

    READS = ("x", "y")
    WRITES = ("x",)
    SLOTS = ("gate",)

    x: str
    y: str
    gate: str
    temperature: float


@dataclass(frozen=True, slots=True)
class AddScaled(Op):
    """`x = (y + b) · w + (x + d) · v`, in place. scales: w, b, v and d, one behind the other `[4 · hidden]`."""

    READS = ("x", "y")
    WRITES = ("x",)
    SLOTS = ("scales",)

    x: str
    y: str
    scales: str


@dataclass(frozen=True, slots=True)
class CarryRouted(Op):
    """`out = x + weight · before`, which the next layer's router takes on; without a weight `out = x`."""

    READS = ("x", "before")
    WRITES = ("out",)
    SLOTS = ("weight",)

    x: str
    before: str | None = None
    weight: str | None = None
    out: str = ROUTED


@dataclass(frozen=True, slots=True)
class ScaleEmbeddings(Op):
    """`x = (x + b) · w`, in place. scales: w and b `[2, hidden]`."""

    READS = ("x",)
    WRITES = ("x",)
    SLOTS = ("scales",)

    x: str = STREAM
    scales: str = "embed_scales"
