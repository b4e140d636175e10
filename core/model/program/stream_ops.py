"""Ops of a residual of several streams, as in Gemma 3n; see `hyper_ops` for those of hyper-connections.

Tests: tests/core/layers/test_streams.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.norms import NormSpec
from .ops import STREAMS, Op


@dataclass(frozen=True, slots=True)
class TakeStream(Op):
    """`out = s[:, active]`, a copy."""

    READS = ("streams",)
    WRITES = ("out",)

    out: str
    active: int
    streams: str = STREAMS


@dataclass(frozen=True, slots=True)
class StreamFactors(Op):
    """Products of the numbers that a stream's rows x are routed to, with a matrix of the layer."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("router_norm", "router", "weight")

    x: str
    out: str
    weight: str
    norm: NormSpec
    router: str = "stream_router"
    router_norm: str = "stream_router_norm"


@dataclass(frozen=True, slots=True)
class PredictStreams(Op):
    """`s += factors · s`: every stream takes of each."""

    READS = ("factors", "streams")
    WRITES = ("streams",)

    factors: str
    streams: str = STREAMS


@dataclass(frozen=True, slots=True)
class CorrectStreams(Op):
    """`s += (1 + factors) ⊗ (x - before)`: every stream takes of the active one's change."""

    READS = ("factors", "x", "before", "streams")
    WRITES = ("streams",)

    factors: str
    x: str
    before: str
    streams: str = STREAMS


@dataclass(frozen=True, slots=True)
class AddToOthers(Op):
    """`s[:, 1:] += y`."""

    READS = ("y", "streams")
    WRITES = ("streams",)

    y: str
    streams: str = STREAMS
