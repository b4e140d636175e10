"""Ops of streams that parts of layers take of by gates, and of tables of n-grams that are added to them.

Tests: tests/core/layers/test_gated_streams.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ..specs.ngrams import NgramSpec
from ..specs.norms import NormSpec
from .ops import STREAMS, Op, Read


@dataclass(frozen=True, slots=True)
class NormStreams(Op):
    """The norm of each stream by itself, with weights of all: `[tokens, streams · hidden]`."""

    READS = ("streams",)
    WRITES = ("out",)
    SLOTS = ("weight",)

    out: str
    weight: str
    norm: NormSpec
    streams: str = STREAMS


@dataclass(frozen=True, slots=True)
class StreamNumbers(Op):
    """`out = 2 · sigmoid(x / count)`, of each stream, in float32."""

    READS = ("x",)
    WRITES = ("out",)

    x: Read
    out: str
    count: int


@dataclass(frozen=True, slots=True)
class MeanOfGated(Op):
    """`out = mean(sigmoid(gates) · x)` over the streams. gates, x: `[tokens, streams · hidden]`."""

    READS = ("gates", "x")
    WRITES = ("out",)

    gates: str
    x: str
    out: str
    count: int


@dataclass(frozen=True, slots=True)
class LookUp(Op):
    """A token's rows of a table, by it and those before it, side by side; sequences' last tokens go on."""

    WRITES = ("out",)
    SLOTS = ("weights", "table")
    IS_CUT = True

    out: str
    lookup: NgramSpec
    weights: str = "lookup"
    table: str = "lookup_table"


@dataclass(frozen=True, slots=True)
class GateLookup(Op):
    """What streams take of a token's rows, and the norm of that: see `NgramSpec`.

    x: keys of all streams, and a value `[tokens, (streams + 1) · hidden]`.
    """

    READS = ("x", "streams")
    WRITES = ("out", "normed")
    SLOTS = ("norm_key", "norm_query", "norm_out")

    x: str
    out: str
    normed: str
    norm: NormSpec
    norm_key: str = "lookup_norm_key"
    norm_query: str = "lookup_norm_query"
    norm_out: str = "lookup_norm_conv"
    streams: str = STREAMS


@dataclass(frozen=True, slots=True)
class AddToStreams(Op):
    """`s += x + y`. x, y: `[tokens, streams · hidden]`."""

    READS = ("x", "y", "streams")
    WRITES = ("streams",)

    x: str
    y: str
    streams: str = STREAMS
