"""Ops of Muse Spark's layers: norms without weights behind, and gates of the residual stream.

Tests: tests/core/layers/test_gated_residual.py
"""

from __future__ import annotations

from dataclasses import dataclass

from .ops import Op


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
