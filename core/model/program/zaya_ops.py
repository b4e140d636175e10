"""Ops of ZAYA's layers: a residual stream with learned factors, and a router that goes over layers.

Tests: tests/core/layers/test_convolved_heads.py
"""

from __future__ import annotations

from dataclasses import dataclass

from .ops import ROUTED, STREAM, Op


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
