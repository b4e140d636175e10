"""Ops of hyper-connections, of layers and of the model's ends: see `HyperConnectionSpec`.

Tests: tests/core/layers/test_hyper_connections.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.hyper_connections import HyperConnectionSpec
from .ops import STREAM, STREAMS, Op


@dataclass(frozen=True, slots=True)
class CopyToStreams(Op):
    """Several streams, each equal to x."""

    READS = ("x",)
    WRITES = ("streams",)

    count: int
    x: str = STREAM
    streams: str = STREAMS


@dataclass(frozen=True, slots=True)
class ConnectStreams(Op):
    """The numbers by which a part takes of streams `[tokens, streams]`, gives to them likewise, and mixes them
    `[tokens, streams²]`, in float32.
    """

    READS = ("streams",)
    WRITES = ("take", "give", "mix")
    SLOTS = ("weight", "base", "scale")

    hyper: HyperConnectionSpec
    weight: str
    base: str
    scale: str
    take: str
    give: str | None = None
    mix: str | None = None
    streams: str = STREAMS


@dataclass(frozen=True, slots=True)
class SumStreams(Op):
    """`out = Σ take · s`, rounded once; without numbers the mean of the streams."""

    READS = ("take", "streams")
    WRITES = ("out",)

    out: str
    take: str | None = None
    streams: str = STREAMS


@dataclass(frozen=True, slots=True)
class GiveToStreams(Op):
    """`s = mixᵀ · s + give ⊗ y`, rounded once; without `mix` the streams are only added to."""

    READS = ("y", "give", "mix", "streams")
    WRITES = ("streams",)

    y: str
    give: str
    mix: str | None = None
    streams: str = STREAMS
