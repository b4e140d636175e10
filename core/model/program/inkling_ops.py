"""Ops of Inkling's layers: relative states, short convolutions of streams, and mixtures with experts of all tokens.

Tests: tests/core/layers/test_relative_attention.py, tests/core/layers/test_stream_convs.py,
tests/core/layers/test_sink_experts.py
"""

from __future__ import annotations

from dataclasses import dataclass

from ....ops.mixers.conv_place import ConvPlace
from ..specs.attention import AttentionSpec
from ..specs.feed_forward import Experts
from ..specs.stream_convs import StreamConvSpec
from .ops import Op, Read


@dataclass(frozen=True, slots=True)
class TakeRelative(Op):
    """Relative states `[tokens, heads · dim]` of columns of x; they grow with their position as queries do."""

    READS = ("x",)
    WRITES = ("out",)

    x: Read
    out: str
    attention: AttentionSpec


@dataclass(frozen=True, slots=True)
class ConvolveStream(Op):
    """`out = x + conv(x)`; the sequences' states go on."""

    READS = ("x",)
    WRITES = ("out",)
    IS_CUT = True
    SLOTS = ("weights",)

    x: Read
    out: str
    width: int
    place: ConvPlace
    convs: StreamConvSpec
    weights: str = "recurrent"


@dataclass(frozen=True, slots=True)
class MoeWithSinks(Op):
    """A mixture of experts, and of sinks: see `Experts.sinks`."""

    READS = ("x",)
    WRITES = ("out",)
    SLOTS = ("experts", "sinks")

    x: Read
    out: str
    spec: Experts
    experts: str = "experts"
    sinks: str = "sink_experts"
